# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_collectives.py do: the first argument says which part.

Every part checks its own results against NumPy and prints one line when it is through.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch

import commute
from commute import plan

sys.path.append(str(Path(__file__).parents[2]))  # for what several rings use

from reductions import DTYPES, fold


def part(dtype, length, rank, number):
    """Numbers that every rank can compute, whose sums and products are exact."""
    rng = np.random.default_rng([number, rank])
    return rng.integers(1, 3, length, endpoint=True).astype(dtype)


def soak(world):
    """Small operations of random kinds and sizes; the second argument says how many."""
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 4000
    choices = np.random.default_rng(20261115)  # the same on all ranks
    for number in range(count):
        kind, root = int(choices.integers(9)), int(choices.integers(world.size))
        length = int(2 ** choices.uniform(0, 13)) - 1
        parts = [part(np.float32, length, rank, number) for rank in range(world.size)]
        mine, total = parts[world.rank], fold("sum", parts)
        if kind == 0:
            np.testing.assert_array_equal(world.allreduce(mine.copy()), total)
        elif kind == 1:
            np.testing.assert_array_equal(world.broadcast(mine.copy(), root), parts[root])
        elif kind == 2:
            got = world.reduce(mine.copy(), root)
            np.testing.assert_array_equal(got, total if world.rank == root else mine)
        elif kind == 3:
            np.testing.assert_array_equal(world.allgather(mine), np.stack(parts))
        elif kind == 4:
            got = world.reduce_scatter(np.stack([mine] * world.size))
            np.testing.assert_array_equal(got, total)
        elif kind == 5:
            world.barrier()
        else:
            exchange(world, kind - 6, parts, root)


def exchange(world, kind, parts, root):
    """One gather, scatter or alltoall of the ranks' parts."""
    mine, at_root = parts[world.rank], world.rank == root
    if kind == 0:
        got = world.gather(mine, root)
        assert (got is None) != at_root
        if at_root:
            np.testing.assert_array_equal(got, np.stack(parts))
    elif kind == 1:
        got = world.scatter(np.stack(parts) if at_root else None, root)
        np.testing.assert_array_equal(got, mine)
    else:
        # Rank r gives everyone its part, each in another order.
        sent = np.stack([np.roll(mine, rank) for rank in range(world.size)])
        got = world.alltoall(sent)
        np.testing.assert_array_equal(got, [np.roll(each, world.rank) for each in parts])


def everything(world):
    """What is beside the plain calls, which covered.py makes."""
    gathered = world.allgather(np.array(world.rank))  # the call by which ranks met comes first
    assert gathered.tolist() == list(range(world.size))
    for by in plan.candidates("barrier", world._wiring.place):
        world.barrier(algorithm=by)
    arrays_that_all_reach(world)
    blocks_of_arrays_that_all_reach(world)
    fetched(world)
    async_and_messages(world)
    uneven(world)
    own_ops(world)
    torch_training(world)


def fetched(world):
    """Blocks read in the memory of other processes, where the host allows it."""
    if world._wiring.place != "memory" or not world._wiring.fetches:
        return
    for number, (dtype, length) in enumerate(itertools.product(DTYPES, (0, 1, 20_011, 300_007))):
        parts = [part(dtype, length, rank, 40_000 + number) for rank in range(world.size)]
        sent = np.stack([np.roll(parts[world.rank], rank) for rank in range(world.size)])
        for by in ("fetch", "shared", None, "fetch"):
            got = world.alltoall(sent, algorithm=by)
            np.testing.assert_array_equal(got, [np.roll(each, world.rank) for each in parts])
            root = number % world.size
            got = world.scatter(sent if world.rank == root else None, root, algorithm=by)
            np.testing.assert_array_equal(got, np.roll(parts[root], world.rank))
        sent[:] = 0  # at once: all have fetched theirs


def arrays_that_all_reach(world):
    """Arrays of empty(), whole and in parts, dropped and made anew."""
    shares = world._wiring.place == "memory"
    for number, (dtype, length) in enumerate(itertools.product(DTYPES, (5, 20_011, 300_007))):
        parts = [part(dtype, length, rank, 20_000 + number) for rank in range(world.size)]
        x = world.empty(length, dtype)
        x[:] = parts[world.rank]
        world.allreduce(x[1:])
        direct = shares and x[1:].nbytes > plan.LINE_BYTES
        assert (world.records()[-1]["algorithm"] == "direct") == direct
        np.testing.assert_array_equal(x[1:], fold("sum", parts)[1:])
        np.testing.assert_array_equal(x[0], parts[world.rank][0])
        root = number % world.size
        x[:] = parts[world.rank]
        np.testing.assert_array_equal(world.broadcast(x, root), parts[root])


def blocks_of_arrays_that_all_reach(world):
    """Blocks that are fetched from arrays of empty(), or from parts of them, into any array."""
    for number, (dtype, length) in enumerate(itertools.product(DTYPES, (3, 90_011))):
        parts = [part(dtype, length, rank, 60_000 + number) for rank in range(world.size)]
        room, out = world.empty((world.size + 1, length), dtype), np.empty_like(parts)
        if number % 2:
            out = world.empty(out.shape, dtype)
        x = room[number % 2 :][: world.size]

        def give(x=x, parts=parts):
            for rank in range(world.size):
                x[rank] = np.roll(parts[world.rank], rank)

        give()
        world.alltoall(x, out=out)
        x[:] = 0  # at once: all have fetched theirs
        np.testing.assert_array_equal(out, [np.roll(each, world.rank) for each in parts])
        give()
        root = number % world.size
        world.scatter(x if world.rank == root else None, root, out=out[0])
        room[:] = 0
        np.testing.assert_array_equal(out[0], np.roll(parts[root], world.rank))


def uneven(world):
    """alltoall_v of every dtype, with counts from none to many; some ranks know what comes."""
    choices = np.random.default_rng(20261116)  # the same on all ranks
    for number, dtype in enumerate(DTYPES * 2):
        most = 40_000 if number % 5 == 0 else 9
        counts = choices.integers(0, most, (world.size, world.size), endpoint=True)
        counts[choices.random(counts.shape) < 0.3] = 0
        parts = [
            [
                part(dtype, 2 * count, source, 30_000 + 100 * number + to).reshape(count, 2)
                for to, count in enumerate(row)
            ]
            for source, row in enumerate(counts)
        ]
        x, told = np.concatenate(parts[world.rank]), (number + world.rank) % 3 == 0
        expected = None if told else counts[:, world.rank]
        wanted = np.concatenate([row[world.rank] for row in parts])
        np.testing.assert_array_equal(world.alltoall_v(x, counts[world.rank], expected), wanted)
        out = np.empty_like(wanted)
        handle = world.alltoall_v_async(x, counts[world.rank], expected, out=out)
        assert world.allreduce(np.ones(1))[0] == world.size
        assert handle.wait(timeout=20) is out
        np.testing.assert_array_equal(out, wanted)


def disagreeing(world):
    """Rank 0 sends rank 1 a row more than it expects; nobody hangs, and all are told."""
    ones = [1] * world.size
    counts = {0: [1, 2, *ones[2:]]}.get(world.rank, ones)
    try:
        world.alltoall_v(np.ones((sum(counts), 5)), counts, ones)
        world.barrier()
        raise AssertionError("nobody raised")
    except commute.MismatchError as error:
        said = "from rank 0 to rank 1 has 10 float64, the receiver expected 5 float64"
        assert said in str(error), error


def own_ops(world):
    """Ufuncs, a compiled function, and every reduction in rank order."""
    for length, root in itertools.product((1, 1001, 250_003), range(world.size)):
        parts = [part(np.int64, length, rank, length) * 6 for rank in range(world.size)]
        total = functools.reduce(np.gcd, parts)
        mine = parts[world.rank]
        np.testing.assert_array_equal(world.allreduce(mine.copy(), np.gcd), total)
        reduced = world.reduce(mine.copy(), root, np.gcd)
        np.testing.assert_array_equal(reduced, total if world.rank == root else mine)
        tall = np.stack([mine] * world.size)
        np.testing.assert_array_equal(world.reduce_scatter(tall, np.gcd), total)
        floats = [
            np.random.default_rng(rank).standard_normal(length).astype("float16")
            for rank in range(world.size)
        ]
        mine, total = floats[world.rank], fold("sum", floats)
        reduced = world.reduce(mine.copy(), root, deterministic=True)
        assert reduced.tobytes() == (total if world.rank == root else mine).tobytes()
        tall = np.stack([mine] * world.size)
        assert world.reduce_scatter(tall, deterministic=True).tobytes() == total.tobytes()
    address = ctypes.cast(ADD, ctypes.c_void_p).value
    np.testing.assert_array_equal(world.allreduce(np.ones(30_000), address), world.size)


def add(a, b, out, count):
    arrays = [
        np.ctypeslib.as_array((ctypes.c_double * count).from_address(at)) for at in (a, b, out)
    ]
    np.add(arrays[0], arrays[1], out=arrays[2])


ADD = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_size_t)(add)


def raising(world):
    """The ufunc of rank 1 raises in the middle of a long array; the others hear of it."""
    calls = []

    def add(a, b):
        calls.append(1)
        if world.rank == 1 and len(calls) > 1000:
            raise ZeroDivisionError("no sum today")
        return a + b

    try:
        world.allreduce(np.ones(20_000), np.frompyfunc(add, 2, 1))
        world.barrier()
        raise AssertionError("nobody raised")
    except ZeroDivisionError:
        assert world.rank == 1
    except commute.AbandonedError as error:
        assert world.rank != 1 and error.rank == 1
        assert "raised ZeroDivisionError: no sum today" in str(error)


def async_and_messages(world):
    """Asynchronous calls in flight, messages between all pairs beside them."""
    others = [rank for rank in range(world.size) if rank != world.rank]
    inbox = {rank: np.empty(60_000) for rank in others}
    receives = [world.recv_async(inbox[rank], source=rank) for rank in others]
    handles = [world.allreduce_async(np.full(1000 * i, float(i))) for i in range(20)]
    world.barrier()
    for rank in others:
        world.send(np.full(60_000, 100.0 * world.rank + rank), to=rank)
    for number, handle in enumerate(handles):
        np.testing.assert_array_equal(handle.wait(), float(number) * world.size)
    for handle in receives:
        handle.wait()
    for rank in others:
        np.testing.assert_array_equal(inbox[rank], 100.0 * rank + world.rank)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    moved = world.sendrecv(np.full(300_000, world.rank), to=right, source=left)
    np.testing.assert_array_equal(moved, left)
    try:
        world.recv(np.empty(1), source=others[0], timeout=0.05)
        raise AssertionError("nothing was sent")
    except commute.OperationTimeoutError:
        pass  # and the group is sound
    mean = np.full(5, world.rank + 1.0)
    np.testing.assert_allclose(world.allreduce(mean, "mean"), (world.size + 1) / 2)
    rng = np.random.default_rng(world.rank)
    noise = world.allreduce(rng.standard_normal(10_007).astype("float32"))
    gathered = world.allgather(noise)
    assert all(row.tobytes() == noise.tobytes() for row in gathered)  # identical bits
    exact = world.allreduce(np.random.default_rng(world.rank).random(99), deterministic=True)
    wanted = fold("sum", [np.random.default_rng(rank).random(99) for rank in range(world.size)])
    assert exact.tobytes() == wanted.tobytes()


def torch_training(world):
    """One data-parallel step by hand."""
    layer = torch.nn.Linear(3, 2)
    for parameter in layer.parameters():
        world.broadcast(parameter)
    layer(torch.full((1, 3), world.rank + 1.0)).sum().backward()
    for parameter in layer.parameters():
        world.allreduce(parameter.grad, op="mean")
    assert torch.allclose(layer.weight.grad, torch.full((2, 3), (world.size + 1) / 2))
    assert world.allgather(layer.weight.detach()).unique(dim=0).shape[0] == 1


def limited(world):
    """Ranks 1 and 2 may make no file large enough for an outbox, and have joined nevertheless."""
    assert world.allgather(np.array(world.rank)).tolist() == list(range(world.size))
    async_and_messages(world)


def crowded(world):
    """Many ranks on few cores: three hundred small and some large calls."""
    for number in range(300):
        assert world.allreduce(np.full(64, float(number)))[0] == world.size * number
    for _ in range(3):
        assert world.allreduce(np.ones(500_000, "float32"))[-1] == world.size
    assert world.allgather(np.array(world.rank)).tolist() == list(range(world.size))


def idle(world):
    """Rank 0 of two comes over a second late to each call; what waiting costs rank 1."""
    x = np.ones(10)
    calls = {
        "allreduce": lambda: world.allreduce(x),
        "barrier": world.barrier,
        "recv": lambda: world.recv(x, source=0) if world.rank else world.send(x, to=1),
        "wait": lambda: world.allreduce_async(x).wait(),
    }
    for what, call in calls.items():
        call()  # opens the links before anything is measured
        world.barrier()
        if world.rank == 0:
            time.sleep(1.2)
        before, begun = cpu(), time.monotonic()
        call()
        waited, used = time.monotonic() - begun, cpu() - before
        if world.rank == 1:
            print(f"{what} waited {waited:.3f} used {used:.4f}", flush=True)


def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def huge(world):
    """More than 4 GiB in one call: sizes, offsets and chunk bounds above 32 bits."""
    count = (4 << 30) + 4099
    x = np.full(count, world.rank + 1, np.uint8)
    x[-1] += 100
    world.allreduce(x, timeout=200)
    assert x[-1] == 203
    step = 64 << 20
    for begin in range(0, count - 1, step):
        assert (x[begin : min(begin + step, count - 1)] == 3).all(), begin
    if world.rank == 0:
        x[-1] = 9
        world.send(x, to=1, timeout=200)
    else:
        world.recv(x, source=0, timeout=200)
        assert x[-1] == 9 and x[0] == 3 and x[(4 << 30) + 1] == 3


def persistent(world):
    """Bound once, started thousands of times, small and large, mixed with other calls."""
    arrays = [np.empty(length) for length in (1, 2000, 100_000)]
    totals = [world.allreduce_init(x) for x in arrays]
    given, barrier = np.empty(3), world.barrier_init()
    news = world.broadcast_init(given, root=world.size - 1)
    whole = world.allgather_init(given)
    wide, row, root = np.empty((world.size, 700)), np.empty(700), world.size - 1
    turned, gathered = world.alltoall_init(wide), world.gather_init(row, root)
    dealt = world.scatter_init(wide if world.rank == root else None, root, out=row)
    for step in range(2000):
        for x, total in zip(arrays, totals, strict=True):
            if x.size > 1 and step % 20:
                continue
            x[:] = step + world.rank
            total.start()
        given[:] = step * world.rank
        if step % 20 == 0:
            news.start()
            handle = world.allreduce_async(np.ones(5))
            assert (news.wait() == step * (world.size - 1)).all()
            whole.start()
            assert (whole.wait() == step * (world.size - 1)).all()
            barrier.start()
            wide[:] = step + world.rank + 10.0 * np.arange(world.size)[:, None]
            turned.start()
            dealt.start()
            gathered.start()  # after the scatter, of what it gave
            ranks = np.arange(world.size)
            assert (turned.wait()[:, 5] == step + ranks + 10 * world.rank).all()
            assert (dealt.wait() == step + root + 10 * world.rank).all()
            table = gathered.wait()
            assert world.rank != root or (table[:, 9] == step + root + 10 * ranks).all()
            for total in reversed(totals):
                np.testing.assert_array_equal(
                    total.wait(), step * world.size + sum(range(world.size))
                )
            assert handle.wait()[0] == world.size
            barrier.wait()
        assert totals[0].wait()[0] == step * world.size + sum(range(world.size))


def two_worlds(world):
    """A second world in the same process, of another name; then the first name once more."""
    with commute.init(name="other") as other:
        assert (other.rank, other.size) == (world.rank, world.size)
        handles = [group.allreduce_async(np.ones(5)) for group in (world, other, world, other)]
        assert [handle.wait()[0] for handle in handles] == [world.size] * 4
    world.barrier()
    with commute.init(name="other") as again:
        assert again.allreduce(np.ones(2))[0] == world.size
    world.barrier()


def main():
    what = sys.argv[1]
    if what == "limited" and os.environ["COMMUTE_RANK"] in ("1", "2"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with commute.init() as world:
        asked = os.environ.get("COMMUTE_SHARED_MEMORY", "")
        expected = {"1": "memory", "0": "loopback"}.get(asked, "tcp")
        assert what == "limited" or world._wiring.place == expected
        globals()[what](world)
        near = ", ".join(map(str, sorted(world._wiring.near))) or "nobody"
        print(f"{what} ok on {world.rank} of {world.size} with {near}", flush=True)


if __name__ == "__main__":
    main()
