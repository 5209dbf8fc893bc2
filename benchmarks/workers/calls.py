# SPDX-License-Identifier: Apache-2.0
"""What a rank gives to each measured call and what must be left: the same for every library.

A call of `bytes` is about one whole array of that size: what is reduced or broadcast, what an
allgather or gather leaves, what a reduce_scatter or scatter is given, both of an alltoall. The
other side of these is one rank's part of it. The root is rank 0. Values differ between the ranks
and, where an array has a part for each rank, between the parts: a library that delivers the wrong
rank's part is found out. A barrier has no array; turns.py explains "wait".

The calls of a parameter server have their own rules, which are in exchanges.py, beside_rank.py and
rows.py.
"""

WAIT = "wait"
PUSH_PULL = "push_pull"
AFTER_IDLE = "after idle"
BESIDE = "beside"
PULL_ROWS = "pull rows"
PUSH_ROWS = "push rows"
FILL_ROWS = "fill rows"
ROW_BYTES = "bytes per row"
SAVE_ROWS = "save rows"

# Calls whose samples last as long as they last, whatever time they report: how many make a turn.
SAMPLES_OF = {WAIT: 3, AFTER_IDLE: 20, BESIDE: 3, FILL_ROWS: 1, ROW_BYTES: 1, SAVE_ROWS: 1}
# Calls of which so many make a sample, whatever their size.
BATCH_OF = {PULL_ROWS: 10, PUSH_ROWS: 10}


def bytes_given(call: str, bytes: int, ranks: int) -> int:
    return bytes // ranks if call in ("allgather", "gather") else bytes


def bytes_left(call: str, bytes: int, ranks: int) -> int:
    return bytes // ranks if call in ("reduce_scatter", "scatter") else bytes


def values_given(call: str, rank: int, ranks: int) -> list[float]:
    """What a rank's array holds before the call: one value per equal part of it."""
    if call == "barrier":
        return []
    parts = ranks if call in ("reduce_scatter", "scatter", "alltoall") else 1
    return [float((rank + 1) * (part + 1)) for part in range(parts)]


def values_left(call: str, rank: int, ranks: int) -> list[float]:
    """What its result must hold after the call: one value per equal part of it."""
    total = ranks * (ranks + 1) / 2
    return {
        "allreduce": [total],
        "broadcast": [1.0],
        "allgather": [float(other + 1) for other in range(ranks)],
        "reduce_scatter": [total * (rank + 1)],
        "gather": [float(other + 1) for other in range(ranks if rank == 0 else 0)],
        "scatter": [float(rank + 1)],
        "alltoall": [float((other + 1) * (rank + 1)) for other in range(ranks)],
        "barrier": [],
    }[call]
