# SPDX-License-Identifier: Apache-2.0
"""Every algorithm is proved for every number of ranks, and is what the textbook says it is."""

from collections.abc import Callable
from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest

from commute.plan import Collective, Op, Plan, algorithms, build, verify
from commute.plan.algorithms.binary_trees import two_trees

ALL = [(collective, name) for collective in Collective for name in algorithms(collective)]


def some_roots(collective: Collective, ranks: int) -> list[int]:
    if not collective.rooted:
        return [0]
    if ranks <= 9:
        return list(range(ranks))
    return [0, 1, ranks // 2, ranks - 1]


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_proved_from_1_to_33_ranks(collective: Collective, name: str) -> None:
    """The verifier passes, for every number of ranks and every root (a few above 9 ranks)."""
    for ranks in range(1, 34):
        for root in some_roots(collective, ranks):
            plan = build(collective, name, ranks, root)

            assert verify(plan).instructions == sum(map(len, plan.programs))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [64, 128])
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_proved_at_64_and_128_ranks(collective: Collective, name: str, ranks: int) -> None:
    """The verifier passes at sizes where its time begins to matter."""
    for root in some_roots(collective, ranks):
        verify(build(collective, name, ranks, root))


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_proved_with_links_that_hold_messages(collective: Collective, name: str) -> None:
    """What works over links that hold nothing works over those that hold some."""
    for ranks in (2, 3, 5, 8):
        for depth in (1, 2, 7):
            verify(build(collective, name, ranks), depth)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16, 33])
def test_ring_is_bandwidth_optimal(ranks: int) -> None:
    """Patarasuk and Yuan 2009: 2(n-1) steps, and per phase (n-1)/n of the data on every link."""
    plan = build("allreduce", "ring", ranks)
    following = {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    shares = {Fraction(chunks, plan.chunks) for chunks in plan.links().values()}

    assert verify(plan).steps == 2 * (ranks - 1)
    assert set(plan.links()) == following
    assert shares == {2 * Fraction(ranks - 1, ranks)}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_halving_doubling_takes_2_log2_n_steps(ranks: int) -> None:
    """Rabenseifner 2004: 2 log2 n steps, each rank sends 2(n-1)/n of the data."""
    plan = build("allreduce", "halving-doubling", ranks)
    sent = [0] * ranks
    for (rank, _), chunks in plan.links().items():
        sent[rank] += chunks

    assert verify(plan).steps == 2 * log2(ranks)
    assert {Fraction(chunks, plan.chunks) for chunks in sent} == {2 * Fraction(ranks - 1, ranks)}


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 33])
def test_halving_doubling_folds_extra_ranks(ranks: int) -> None:
    """With any other number, two more steps, one before and one after."""
    core = 1 << (ranks.bit_length() - 1)

    assert verify(build("allreduce", "halving-doubling", ranks)).steps == 2 * log2(core) + 2


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_tree_has_2_log2_n_levels(ranks: int) -> None:
    """Binomial tree up and down: 2 log2 n levels, 2(n-1) messages."""
    report = verify(build("allreduce", "tree", ranks))

    assert report.steps == 2 * log2(ranks)
    assert report.messages == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", [3, 4, 8, 15])
def test_tree_streams_upwards(ranks: int) -> None:
    """An inner rank passes on while it adds, so it never sends a whole array upwards by itself."""
    plan = build("allreduce", "tree", ranks)
    for rank in range(2, ranks, 2):
        program = plan.programs[rank]
        if rank + 1 < ranks:
            assert np.count_nonzero(program["op"] == Op.RECV_REDUCE_SEND) == 1
            assert rank & (rank - 1) not in program["peer"][program["op"] == Op.SEND]


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_binomial_takes_log2_n_steps(collective: str, ranks: int) -> None:
    """log2 n steps and n-1 messages, each rank but the root on one end of exactly one upward."""
    report = verify(build(collective, "binomial", ranks, root=ranks - 1))

    assert report.steps == log2(ranks)
    assert report.messages == ranks - 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9, 33])
def test_barrier_takes_ceil_log2_n_steps(ranks: int) -> None:
    """Hensgen, Finkel and Manber 1988: dissemination takes ceil(log2 n) steps for every n."""
    assert verify(build("barrier", "dissemination", ranks)).steps == ceil(log2(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_rings_of_blocks_take_n_minus_1_steps(collective: str, ranks: int) -> None:
    """n-1 steps, and n-1 blocks on every link."""
    plan = build(collective, "ring", ranks)

    assert verify(plan).steps == ranks - 1
    assert set(plan.links().values()) == {(ranks - 1) * plan.chunks}


def sent_by_each(plan: Plan) -> list[Fraction]:
    """How much of a block each rank sends."""
    sent = [0] * plan.ranks
    for (rank, _), chunks in plan.links().items():
        sent[rank] += chunks
    return [Fraction(chunks, plan.chunks) for chunks in sent]


@pytest.mark.parametrize("ranks", [3, 4, 7, 8, 16, 33])
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("bidirectional-ring", lambda n: 2 * (n - 1)),
        ("bidirectional-ring-meeting", lambda n: 2 * ceil((n - 1) / 2)),
    ],
)
def test_both_ways_round_a_ring(name: str, steps: Callable[[int], int], ranks: int) -> None:
    """Each link carries (n-1)/n of the data in each direction; sums that meet take half the steps.

    The bound on the steps of the second form is that of the hop arithmetic, here for the schedule.
    """
    plan = build("allreduce", name, ranks)
    neighbours = {(rank, (rank + way) % ranks) for rank in range(ranks) for way in (1, -1)}
    shares = {Fraction(chunks, plan.chunks) for chunks in plan.links().values()}

    assert verify(plan).steps == steps(ranks)
    assert set(plan.links()) == neighbours
    assert shares == {Fraction(ranks - 1, ranks)}


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 8, 12, 31, 33])
def test_circulant_is_optimal_for_every_number_of_ranks(ranks: int) -> None:
    """Träff 2023: 2 ceil(log2 n) steps, and every rank sends 2(n-1)/n of the data."""
    plan = build("allreduce", "circulant", ranks)

    assert verify(plan).steps == 2 * ceil(log2(ranks))
    assert set(sent_by_each(plan)) == {2 * Fraction(ranks - 1, ranks)}


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 12, 33])
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_circulant_halves_are_optimal(collective: str, ranks: int) -> None:
    """Bruck et al. 1997: ceil(log2 n) steps, and every rank sends n-1 blocks."""
    plan = build(collective, "circulant", ranks)

    assert verify(plan).steps == ceil(log2(ranks))
    assert set(sent_by_each(plan)) == {ranks - 1}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_recursive_doubling_takes_log2_n_steps(ranks: int) -> None:
    """Thakur, Rabenseifner and Gropp 2005: log2 n steps, each with the whole array."""
    plan = build("allreduce", "recursive-doubling", ranks)

    assert verify(plan).steps == log2(ranks)
    assert set(sent_by_each(plan)) == {log2(ranks)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 64, 127, 128])
def test_nobody_has_children_in_both_trees(ranks: int) -> None:
    """Sanders, Speck and Träff 2009: two children at most, in one tree only, in log2 n levels."""
    trees = two_trees(ranks)
    for place in range(1, ranks + 1):
        counts = [len(tree.children[place]) for tree in trees]

        assert min(counts) == 0
        assert max(counts) <= 2
        for tree in trees:
            levels, above = 1, tree.parent[place]
            while above:
                levels, above = levels + 1, tree.parent[above]
            assert levels <= ranks.bit_length()


@pytest.mark.parametrize("ranks", [3, 4, 5, 8, 9, 16, 33])
def test_double_trees_spread_the_load(ranks: int) -> None:
    """No rank sends more than two arrays to sum and spread, nor more than one to broadcast."""
    assert max(sent_by_each(build("allreduce", "double-tree", ranks))) <= 2
    assert max(sent_by_each(build("broadcast", "double-tree", ranks, 2))) <= 1
    assert verify(build("broadcast", "double-tree", ranks, 2)).steps <= ranks.bit_length()


@pytest.mark.parametrize("ranks", [2, 3, 8, 9, 33])
def test_scatter_allgather_sends_two_arrays_at_most(ranks: int) -> None:
    """Twice ceil(log2 n) steps; everyone gets at most one array each in both phases."""
    plan = build("broadcast", "scatter-allgather", ranks, ranks - 1)
    received = [0] * ranks
    for (_, rank), chunks in plan.links().items():
        received[rank] += chunks

    assert verify(plan).steps <= 2 * ceil(log2(ranks))
    assert max(sent_by_each(plan)) <= 2
    assert max(received) < 2 * plan.chunks
    assert received[ranks - 1] == 0


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_chain_sends_the_array_once(ranks: int) -> None:
    """n-1 steps for the first part, and each rank but the last sends one array."""
    plan = build("broadcast", "chain", ranks, 1)

    assert verify(plan).steps == ranks - 1
    assert sorted(sent_by_each(plan)) == [0] + [1] * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_token_goes_round_twice(ranks: int) -> None:
    """2(n-1) steps, as many messages: never more than one on its way."""
    report = verify(build("barrier", "token-ring", ranks))

    assert report.steps == report.messages == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 33])
@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_trees_of_blocks_have_few_messages_at_the_root(collective: str, ranks: int) -> None:
    """n-1 messages either way; of a tree's, ceil(log2 n) at the root, and as many steps at most."""
    root = ranks - 1
    linear, binomial = (build(collective, name, ranks, root) for name in ("linear", "binomial"))
    at_root = [len(plan.peers(root)) for plan in (linear, binomial)]

    assert at_root == [ranks - 1, ceil(log2(ranks))]
    assert verify(linear).messages == verify(binomial).messages == ranks - 1
    assert verify(linear).steps == 1
    assert verify(binomial).steps <= ceil(log2(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 33])
def test_alltoall_by_few_bytes_or_few_messages(ranks: int) -> None:
    """Pairwise: n-1 messages of a block each. Bruck et al. 1997: ceil(log2 n) of half of them."""
    pairwise, bruck = (build("alltoall", name, ranks) for name in ("pairwise", "bruck"))
    most = ceil(log2(ranks)) * (ranks // 2)

    assert set(pairwise.links().values()) == {pairwise.chunks}
    assert verify(pairwise).messages == ranks * (ranks - 1)
    assert verify(bruck).messages == ranks * ceil(log2(ranks))
    assert verify(bruck).steps == ceil(log2(ranks))
    assert max(sent_by_each(bruck)) <= most


@pytest.mark.parametrize("ranks", [2, 3, 4, 9, 33])
def test_who_adds_in_rank_order(ranks: int) -> None:
    """gather-to-root, chain and one-shot do for every number of ranks; the ring never does."""
    order = {name: verify(build("allreduce", name, ranks)).rank_order for name in
             algorithms("allreduce")}  # fmt: skip

    assert order["gather-to-root"]
    assert order["one-shot"]
    assert order["chain"]
    assert not order["ring"]
    assert not order["halving-doubling"]


@pytest.mark.parametrize("ranks", [2, 3, 4, 9, 33])
def test_chains_carry_an_array_once(ranks: int) -> None:
    """n-1 links up the chain; down it again, or from its end to where the result belongs."""
    up = {(rank, rank + 1) for rank in range(ranks - 1)}
    last = ranks - 1
    whole = build("allreduce", "chain", ranks)
    assert whole.links() == dict.fromkeys(up | {(b, a) for a, b in up}, 1)
    assert verify(whole).steps == 2 * (ranks - 1)
    for root in (0, ranks // 2, last):
        plan = build("reduce", "chain", ranks, root=root)
        home = {(last, root)} if root != last else set()

        assert plan.links() == dict.fromkeys(up | home, 1)
        assert verify(plan).rank_order
    links = build("reduce_scatter", "chain", ranks).links()

    assert all(links[link] == ranks for link in up if link[1] != 0)
    assert all(links[last, rank] == 1 for rank in range(last - 1))


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_one_rank_has_next_to_nothing_to_do(collective: Collective, name: str) -> None:
    """Alone, a rank sends nothing; where input and output are two arrays it copies."""
    plan = build(collective, name, 1)
    in_place = ("barrier", "broadcast", "reduce", "allreduce")
    copies = collective.label not in in_place

    assert set(plan.programs[0]["op"].tolist()) == ({int(Op.COPY)} if copies else set())
