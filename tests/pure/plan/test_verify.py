# SPDX-License-Identifier: Apache-2.0
"""Each check of the verifier refuses what it is there to refuse, and says where."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commute.plan import Collective, Op, Plan, PlanError, build, verify
from commute.plan.program import IN, OUT, OUTBOX, SCRATCH, Rank, write


def changed(plan: Plan, rank: int, index: int, **fields: Any) -> Plan:
    """The plan with some fields of one instruction set to other values."""
    programs = [program.copy() for program in plan.programs]
    for name, value in fields.items():
        programs[rank][name][index] = value
    return dataclasses.replace(plan, programs=tuple(programs))


def without(plan: Plan, rank: int, index: int) -> Plan:
    """The plan with one instruction left out."""
    programs = list(plan.programs)
    programs[rank] = np.delete(programs[rank], index)
    return dataclasses.replace(plan, programs=tuple(programs))


def allreduce(ranks: int, each_rank: Callable[[Rank], None], **sizes: int) -> Plan:
    return write(Collective.ALLREDUCE, "test", ranks, each_rank, **sizes)


RING = build("allreduce", "ring", 3)  # lane 0 is instructions 0 to 7, lane 1 is 8 to 15
SHOT = build("allreduce", "one-shot", 2)  # wait, put, signal, wait, reduce_many, signal
STAR = build("allreduce", "gather-to-root", 3)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (changed(RING, 1, 0, op=9), r"rank 1, lane 0, step 0 \(op 9\): there is no such op"),
        (changed(RING, 1, 2, flags=1), "flags 1 are not allowed"),
        (changed(RING, 1, 0, src_space=7), "source space 7 is not allowed"),
        (changed(RING, 1, 0, src_space=3), "source space 3 is not allowed"),
        (changed(RING, 1, 0, dst_space=1), "destination space 1 is not allowed"),
        (changed(RING, 1, 9, dst_space=0), "destination space 0 is not allowed"),
        (changed(RING, 1, 0, peer2=2), "second peer 2 has no use"),
        (changed(RING, 1, 0, dst=1), "destination 1 has no use"),
        (changed(RING, 1, 14, src=1), "source 1 has no use"),
        (changed(RING, 1, 0, arg=1), "argument 1 has no use"),
        (changed(RING, 1, 0, count=0), "at least one chunk"),
        (changed(RING, 1, 0, dep_step=1), "step 1 of no lane"),
        (changed(RING, 1, 0, peer=3), "peer 3 is not a rank from 0 to 2"),
        (changed(RING, 1, 0, peer=-1), "peer -1 is not a rank"),
        (changed(RING, 1, 0, peer=1), "exchanges nothing with itself"),
        (changed(RING, 1, 3, lane=1), "lanes must be sorted"),
        (changed(RING, 1, 15, lane=3), "without a gap"),
        (changed(RING, 1, 2, dep_lane=2), "there is no lane 2"),
        (changed(RING, 1, 2, dep_lane=0), "its own lane"),
        (changed(RING, 1, 2, dep_step=8), "lane 1 has no step 8"),
        (changed(RING, 1, 0, src=6), r"src 6 \+ 1 is beyond its space"),
        (changed(RING, 1, 8, dst=2), "different chunks of a block"),
        (changed(RING, 1, 0, src=2), "is not the run that rank 2, lane 1, step 0"),
        (changed(RING, 1, 0, count=2), "is not the run that rank 2"),
        (changed(SHOT, 0, 0, count=1), "count 1 has no use"),
        (changed(SHOT, 0, 2, arg=8), "there is no counter 8"),
        (changed(SHOT, 0, 3, src=2), "rank 1 does not signal that often"),
        (changed(SHOT, 0, 3, src=0, arg=7), "rank 1 never signals this counter"),
        (changed(SHOT, 0, 4, flags=4), "flags 4 are not allowed"),
        (changed(SHOT, 0, 4, arg=5), r"arg 5 \+ 1 is beyond its space"),
        (changed(SHOT, 0, 4, peer=0), "peer 0 has no use"),
        (dataclasses.replace(RING, chunks=0), "0 chunks"),
        (dataclasses.replace(RING, root=1), "cannot have root 1"),
        (dataclasses.replace(RING, blocks=(1, 1, 0, 0)), r"has \(0, 1\) blocks of IN and OUT"),
        (dataclasses.replace(RING, programs=RING.programs[:2]), "3 ranks has 2 programs"),
        (
            dataclasses.replace(RING, programs=(np.zeros(3, "V16"),) * 3),
            "not a flat array of instr",
        ),
    ],
)
def test_invalid_fields_are_refused(plan: Plan, message: str) -> None:
    """Every field of every instruction means something, or is empty."""
    with pytest.raises(PlanError, match=message):
        verify(plan)


def test_run_must_stay_in_its_block() -> None:
    """A run that crosses into the next block would not be one piece of memory."""

    def each_rank(me: Rank) -> None:
        me.lane().copy(IN[0], into=OUT[0])
        me.lane().copy(IN[1:3], into=OUT[1:3])

    plan = write(Collective.ALLGATHER, "test", 2, each_rank, chunks=2)

    with pytest.raises(PlanError, match=r"src 1 \+ 2 is beyond|crosses into the next block"):
        verify(plan)


def test_blocks_lie_side_by_side_in_scratch() -> None:
    """Only there a run may go on into the next block; it must still end inside the space."""

    def each_rank(me: Rank) -> None:
        lane = me.lane()
        for block in range(2):
            lane.copy(IN[block], into=SCRATCH[block])
        if me.rank == 0:
            lane.send(SCRATCH[0:2], to=1)
        else:
            lane.recv(SCRATCH[2 : 2 + length], source=0)
        for block in range(2):
            lane.copy(SCRATCH[block], into=OUT[block])

    length = 2
    with pytest.raises(PlanError, match=r"rank 0 ends with OUT\[1\] = x0 of block 1, expected x1"):
        verify(write(Collective.ALLTOALL, "test", 2, each_rank, scratch=4))
    with pytest.raises(PlanError, match=r"dst 2 \+ 2 is beyond its space"):
        verify(write(Collective.ALLTOALL, "test", 2, each_rank, scratch=3))
    length = 1
    with pytest.raises(PlanError, match="is not the run that"):
        verify(write(Collective.ALLTOALL, "test", 2, each_rank, scratch=3))


@pytest.mark.parametrize(
    ("collective", "fields", "message"),
    [
        ("gather", {"src_space": 1}, "gather has OUT on the root only"),
        ("scatter", {"op": Op.COPY, "peer": -1, "src_space": 0}, "scatter has IN on the root only"),
    ],
)
def test_arrays_that_only_the_root_has(
    collective: str, fields: dict[str, int], message: str
) -> None:
    """Off the root a gather has no result and a scatter nothing to give."""
    plan = build(collective, "linear", 2)

    with pytest.raises(PlanError, match=message):
        verify(changed(plan, 1, 0, **fields))


def test_blocks_that_end_in_the_wrong_place() -> None:
    """A block is known by its number too: the right rank's wrong block is an error."""
    plan = build("scatter", "linear", 3)  # lane 0 of the root sends blocks 1 and 2

    with pytest.raises(
        PlanError, match=r"rank 1 ends with .* x0 of block 2, expected x0 of block 1"
    ):
        verify(changed(plan, 0, 0, src=2))


def test_reduce_has_no_out_but_on_the_root() -> None:
    """A rank that gets no result has no array to put one."""
    plan = build("reduce", "binomial", 3)

    with pytest.raises(PlanError, match="OUT on the root only"):
        verify(changed(plan, 1, 0, src_space=1))


def test_unmatched_message_is_refused() -> None:
    """A message that nobody receives, or that nobody sends, names both ranks."""
    programs = [p.copy() for p in STAR.programs]
    programs[2] = programs[2][1:]
    programs[2]["lane"] = 0

    with pytest.raises(PlanError, match=r"rank 2 sends 0 messages to rank 0 .* receives 1"):
        verify(dataclasses.replace(STAR, programs=tuple(programs)))


def test_direction_must_have_one_lane() -> None:
    """Two lanes that send to one rank would race for the order of their messages."""

    def each_rank(me: Rank) -> None:
        other = 1 - me.rank
        first, second, into = me.lane(), me.lane(), me.lane()
        first.send(OUT[0], to=other)
        second.send(OUT[1], to=other)
        into.recv_reduce(OUT[0], into=SCRATCH[0], source=other)
        into.recv_reduce(OUT[1], into=SCRATCH[1], source=other)

    with pytest.raises(PlanError, match="sends in one direction from more than one lane"):
        verify(allreduce(2, each_rank, chunks=2, scratch=1))


def test_counter_must_have_one_lane() -> None:
    """Two lanes that signal one counter would make its n-th signal ambiguous."""

    def each_rank(me: Rank) -> None:
        me.lane().signal(0)
        me.lane().signal(0)

    with pytest.raises(PlanError, match="signals one counter from more than one lane"):
        verify(allreduce(2, each_rank))


def exchange(me: Rank) -> None:
    """Both ranks send, then receive, in one lane: fine only if links hold a message."""
    lane = me.lane()
    lane.send(OUT[0], to=1 - me.rank)
    lane.recv_reduce(OUT[0], source=1 - me.rank)


def test_deadlock_is_refused_at_the_depth_where_it_happens() -> None:
    """Sends that wait for each other stop when links hold nothing, not when they hold one."""
    plan = allreduce(2, exchange)

    with pytest.raises(PlanError, match=r"deadlock: rank 0, lane 0, .* waits for rank 1"):
        verify(plan)
    with pytest.raises(PlanError, match="different orders"):
        verify(plan, depth=1)


def test_deadlock_counts_messages_in_flight() -> None:
    """Two messages each way need links that hold two."""

    def each_rank(me: Rank) -> None:
        lane, other = me.lane(), 1 - me.rank
        for chunk in range(2):
            lane.send(OUT[chunk], to=other)
        for chunk in range(2):
            lane.recv_reduce(OUT[chunk], source=other)

    plan = allreduce(2, each_rank, chunks=2)

    for depth in (0, 1):
        with pytest.raises(PlanError, match="deadlock"):
            verify(plan, depth)
    with pytest.raises(PlanError, match="different orders"):
        verify(plan, depth=2)


def test_dependencies_in_a_circle_are_a_deadlock() -> None:
    """Lanes that wait for each other never move."""
    plan = changed(RING, 0, 8, dep_lane=0, dep_step=2)

    with pytest.raises(PlanError, match=r"deadlock: rank 0, lane"):
        verify(plan)


def test_missing_dependency_is_a_race() -> None:
    """A send that does not wait for what it sends may send too early."""
    plan = changed(RING, 0, 2, dep_lane=255, dep_step=0)

    with pytest.raises(
        PlanError, match=r"race: .*send OUT\[2\].* touch the same chunk in no order"
    ):
        verify(plan)


def scratch_ring(me: Rank) -> None:
    """A reduce_scatter whose receives do not care whether SCRATCH is still being sent."""
    n, following, preceding = me.size, (me.rank + 1) % me.size, (me.rank - 1) % me.size
    out, into = me.lane(), me.lane()
    sums, arrived = IN[preceding], None
    for step in range(n - 1):
        out.send(sums, to=following, after=arrived)
        block = (me.rank - 2 - step) % n
        place = OUT[0] if block == me.rank else SCRATCH[step]
        arrived = into.recv_reduce(IN[block], into=place, source=preceding)
        sums = place


def test_race_with_the_next_tile_is_refused() -> None:
    """SCRATCH is the same memory in the next tile, which may arrive before the last send left."""
    plan = write(Collective.REDUCE_SCATTER, "test", 4, scratch_ring, scratch=3)

    with pytest.raises(PlanError, match=r"race: .* and 1 tile later .*SCRATCH"):
        verify(plan)


def two_lanes_one_shot(me: Rank, lag: int) -> None:
    """Puts and reads in lanes of their own, so that puts may run ahead of the readers."""
    puts, reads = me.lane(), me.lane()
    for rank in range(me.size):
        puts.wait(1, of=rank, lag=lag)
    put = puts.put(OUT[0], into=OUTBOX[0])
    puts.signal(0)
    for peer in me.others:
        reads.wait(0, of=peer)
    reads.reduce_many(OUT[0], OUTBOX[0], into=OUT[0], after=put)
    reads.signal(1)


def test_race_on_outbox_two_tiles_later_is_refused() -> None:
    """A slot must not be refilled before everyone is done with the tile two tiles ago."""
    good = allreduce(3, lambda me: two_lanes_one_shot(me, lag=2), outbox=1)
    late = allreduce(3, lambda me: two_lanes_one_shot(me, lag=3), outbox=1)

    assert verify(good).rank_order
    with pytest.raises(PlanError, match=r"race: .*reduce_many.* and 2 tiles later .*put OUTBOX"):
        verify(late)


def test_reading_an_outbox_unasked_is_a_race() -> None:
    """Without waiting for READY, a rank may read what is not there yet."""
    plan = changed(SHOT, 1, 3, src=0)

    with pytest.raises(PlanError, match=r"race: .*reduce_many"):
        verify(plan)


def test_counting_twice_is_refused() -> None:
    """A contribution that is added twice is named."""

    def each_rank(me: Rank) -> None:
        out, into = me.lane(), me.lane()
        if me.rank == 0:
            into.recv_reduce(OUT[0], source=1)
            last = into.recv_reduce(OUT[0], source=1)
            out.send(OUT[0], to=1, after=last)
        else:
            out.send(OUT[0], to=0)
            out.send(OUT[0], to=0)
            into.recv(OUT[0], source=0)

    with pytest.raises(PlanError, match=r"OUT\[0\] = x0 \+ 2\*x1, expected every rank once"):
        verify(allreduce(2, each_rank))


def test_leaving_out_is_refused() -> None:
    """So is one that is missing."""
    with pytest.raises(PlanError, match=r"rank 0 ends with OUT\[0\] = x0, expected every rank"):
        verify(allreduce(2, lambda me: None))


def test_wrong_block_is_refused() -> None:
    """Blocks of a reduce_scatter are not to be mixed up."""

    def each_rank(me: Rank) -> None:
        out, into = me.lane(), me.lane()
        out.send(IN[me.rank], to=1 - me.rank)
        into.recv_reduce(IN[1 - me.rank], into=OUT[0], source=1 - me.rank)

    with pytest.raises(PlanError, match=r"rank 0 ends with .* of block 1, expected .* of block 0"):
        verify(write(Collective.REDUCE_SCATTER, "test", 2, each_rank))


def test_adding_different_blocks_is_refused() -> None:
    """x0 of one block plus x1 of another is no sum of anything."""

    def each_rank(me: Rank) -> None:
        out, into = me.lane(), me.lane()
        out.send(IN[me.rank], to=1 - me.rank)
        into.recv_reduce(IN[me.rank], into=OUT[0], source=1 - me.rank)

    with pytest.raises(PlanError, match="adds up different blocks"):
        verify(write(Collective.REDUCE_SCATTER, "test", 2, each_rank))


def test_using_what_nobody_wrote_is_refused() -> None:
    """The first tile finds nothing in SCRATCH, so no tile may rely on it."""

    def each_rank(me: Rank) -> None:
        me.lane().copy(SCRATCH[0], into=OUT[0])

    with pytest.raises(PlanError, match="nobody has written"):
        verify(allreduce(1, each_rank, scratch=1))


def test_wrong_source_of_a_copy_is_refused() -> None:
    """A broadcast from the wrong root, and an allgather into the wrong block."""
    plan = dataclasses.replace(build("broadcast", "binomial", 2), root=1)
    with pytest.raises(PlanError, match="nobody has written"):
        verify(plan)

    swapped = build("allgather", "ring", 2)
    programs = tuple(program.copy() for program in swapped.programs)
    for program in programs:
        written = program["dst_space"] == 1
        program["dst"][written] = (program["dst"][written] + 2) % 4
    with pytest.raises(PlanError, match=r"rank 0 ends with OUT\[0\] = x1, expected x0"):
        verify(dataclasses.replace(swapped, programs=programs))


def test_different_orders_of_addition_are_refused() -> None:
    """x0 + x1 here and x1 + x0 there need not be the same bits."""

    def each_rank(me: Rank) -> None:
        out, into = me.lane(), me.lane()
        out.send(OUT[0], to=1 - me.rank)
        into.recv_reduce(OUT[0], into=SCRATCH[0], source=1 - me.rank)
        into.copy(SCRATCH[0], into=OUT[0], after=None)

    plan = allreduce(2, each_rank, scratch=1)
    with pytest.raises(PlanError, match="race"):
        verify(plan)

    programs = tuple(program.copy() for program in plan.programs)
    for program in programs:
        program["dep_lane"][2] = 0
    with pytest.raises(PlanError, match=r"ranks 0 and 1 add up OUT\[0\] in different orders"):
        verify(dataclasses.replace(plan, programs=programs))


def test_what_arrives_may_come_first() -> None:
    """Up a chain, x0 + x1 is in rank order only if the message is the left operand."""
    plan = build("reduce", "chain", 3, root=2)
    turned = tuple(program.copy() for program in plan.programs)
    for program in turned:
        program["flags"] = 0

    assert verify(plan).rank_order
    assert not verify(dataclasses.replace(plan, programs=turned)).rank_order


def test_barrier_that_lets_someone_through_is_refused() -> None:
    """A rank that does not hear of another, even indirectly, may leave too early."""
    plan = build("barrier", "dissemination", 4)
    programs = tuple(program.copy() for program in plan.programs)
    for program in programs:
        program["dep_lane"], program["dep_step"] = 255, 0

    with pytest.raises(PlanError, match="rank 0 can leave before rank 1 enters"):
        verify(dataclasses.replace(plan, programs=programs))


def test_storing_back_where_others_read() -> None:
    """A sum that goes back into the outboxes it came from must not be read or put too early."""
    plan = build("allreduce", "two-shot", 3)
    steps = [Op(int(op)).name for op in plan.programs[0]["op"]]
    many, last = steps.index("REDUCE_MANY"), len(steps) - 1

    assert verify(plan).rank_order
    with pytest.raises(PlanError, match="joins different chunks of a block"):
        verify(changed(plan, 0, many, arg=1))
    with pytest.raises(PlanError, match=r"race: .* touch the same chunk"):
        verify(without(plan, 0, last - 1))  # reads before the owner says that it has reduced
    with pytest.raises(PlanError, match=r"rank 1 ends with OUT\[0\] = x1|race"):
        verify(changed(plan, 0, many, flags=0))  # nothing comes back


def test_settled_outboxes() -> None:
    """A rank's outbox is its own again at the end only if all others have then left it alone."""
    assert verify(build("allreduce", "two-shot", 3)).settled == (True, True, True)
    assert verify(build("allreduce", "one-shot", 3)).settled == (False, False, False)
    assert verify(build("broadcast", "shared", 3, 1)).settled == (True, False, True)
    assert verify(build("barrier", "shared", 3)).settled == (True, True, True)
    assert verify(build("allreduce", "ring", 3)).settled == (True, True, True)


def test_negative_depth_is_refused() -> None:
    """A link cannot hold less than nothing."""
    with pytest.raises(ValueError, match="at least 0 messages, got -1"):
        verify(RING, depth=-1)


@pytest.mark.parametrize("waits", [False, True])
def test_shorter_last_tile_lies_where_lower_chunks_were(waits: bool) -> None:
    """Chunk 1 of a short tile may lie where chunk 0 of the tile before is still being read."""

    def each_rank(me: Rank) -> None:
        if me.rank == 0:
            lane = me.lane()
            lane.send(OUT[1], to=1)
            lane.send(OUT[0], to=1)
            return
        incoming, copying = me.lane(), me.lane()
        upper = incoming.recv(SCRATCH[1], source=0)
        first = copying.copy(SCRATCH[1], into=OUT[1], after=upper)
        lower = incoming.recv(SCRATCH[0], source=0, after=first)
        last = copying.copy(SCRATCH[0], into=OUT[0], after=lower)
        if waits:
            incoming.copy(SCRATCH[0], into=SCRATCH[2], after=last)

    plan = write(Collective.BROADCAST, "test", 2, each_rank, chunks=2, scratch=2)

    if waits:
        verify(plan)
    else:
        with pytest.raises(
            PlanError, match=r"copy OUT\[0\].* and 1 tile later .*recv SCRATCH\[1\]"
        ):
            verify(plan)
