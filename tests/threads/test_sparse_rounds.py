# SPDX-License-Identifier: Apache-2.0
"""Sparse tables of several workers: rounds, bounds, pieces, loss; admission, expiry, the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import commute
from commute import FTRL, SGD, Adagrad, Adam, Group, Momentum
from references import RowTable

SHARDS = [1, 3, 5]
ROUNDS = 6
OPTIMIZERS = [
    SGD(lr=0.1, weight_decay=0.2),
    Momentum(lr=0.05, momentum=0.7, dampening=0.3),
    Momentum(lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
    Adagrad(lr=0.3),
    Adagrad(lr=0.3, lr_decay=0.25, initial=0.5, eps=1e-3, weight_decay=0.1),
    Adam(lr=0.02),
    Adam(lr=0.02, betas=(0.6, 0.8), eps=1e-2, weight_decay=0.3),
    FTRL(lr=0.5, beta=0.3, l2=0.2),
    FTRL(lr=0.2, beta=0.5, l1=1.5, l2=0.1),
]


def given(seed: int, rank: int, turn: int, width: int, dtype: str) -> tuple[Any, Any]:
    """What a rank pushes in a round: unsorted and repeated keys that others push as well."""
    rng = np.random.default_rng([seed, rank, turn])
    keys = rng.integers(0, 60, size=int(rng.integers(0, 80))).astype(np.uint64) << np.uint64(58)
    keys += rng.integers(0, 3, size=len(keys)).astype(np.uint64)
    if turn % 3 == 2:  # in two pieces: none is in both, for the bits depend on the order
        keys = rng.permutation(np.unique(keys))
    return keys, rng.normal(size=(len(keys), width)).astype(dtype)


EVERYTHING = (np.arange(64, dtype=np.uint64) << np.uint64(58))[:, None] + np.arange(
    4, dtype=np.uint64
)


def train(group: Group, seed: int, width: int, dtype: str, **options: Any) -> list[Any]:
    """What this rank sees of all rows after each of its rounds."""
    e = group.store("rounds", staleness=0, deterministic=True).sparse("e", width, dtype, **options)
    seen = []
    for turn in range(ROUNDS):
        keys, rows = given(seed, group.rank, turn, width, dtype)
        how = turn % 3
        if how == 0:
            e.push(keys, rows)
        elif how == 1:
            e.push_pull(keys, rows)
        else:
            half = len(keys) // 2
            e.push(keys[:half], rows[:half], accumulate=True)
            e.push(keys[half:], rows[half:])
        seen.append(e.pull(EVERYTHING))
    return seen


# ---- updates ----


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("update", OPTIMIZERS, ids=str)
def test_optimizers_have_the_bits_of_numpy(ranks, seed, update, width, dtype):
    """A row is updated as a dense table of its own, by the rounds that name it."""
    init = None if isinstance(update, FTRL) else 0.5
    options = {"update": update, "init": init}
    seen = ranks(3, shards=3).values(lambda g: train(g, seed, width, dtype, **options))
    first = np.full(width, init or 0.0, dtype)
    expected = RowTable(width, dtype, update, lambda key: first)
    for turn in range(ROUNDS):
        expected.push(*(given(seed, rank, turn, width, dtype) for rank in range(3)))
        for rank_saw in seen:
            np.testing.assert_array_equal(rank_saw[turn], expected.pull(EVERYTHING), strict=True)


@pytest.mark.parametrize("update", ["sum", "assign", "min", "max", "prod"])
@pytest.mark.parametrize("shards", SHARDS)
def test_plain_updates(ranks, seed, update, shards):
    """`assign` takes the highest rank's of those that named the row."""
    seen = ranks(3, shards=shards).values(
        lambda g: train(g, seed, 2, "float64", update=update, init=1.5)
    )
    expected = RowTable(2, "float64", update, lambda key: np.full(2, 1.5))
    for turn in range(ROUNDS):
        expected.push(*(given(seed, rank, turn, 2, "float64") for rank in range(3)))
        for rank_saw in seen:
            np.testing.assert_array_equal(rank_saw[turn], expected.pull(EVERYTHING))


@pytest.mark.parametrize("update", ["sum", SGD(lr=0.5), Adam(lr=0.1)], ids=str)
def test_the_mean_is_over_those_that_pushed(stores, update):
    """In the round, whichever rows they named: an empty push counts, a tick does not."""
    workers = stores(3)
    a, b, c = workers.rows("e", 1, "float64", update=update, reduce="mean")
    expected = RowTable(1, "float64", update)
    rounds = [({0: [7, 8], 1: [8]}, 2), ({0: [7], 1: [], 2: [9]}, 3), ({2: [8, 8]}, 1)]
    for pushed, divisor in rounds:
        for rank, table in enumerate((a, b, c)):
            if rank in pushed:
                table.push(pushed[rank], np.full((len(pushed[rank]), 1), 3.0))
        for store in workers:
            store.tick()
        given = [(np.array(k, np.uint64), np.full((len(k), 1), 3.0)) for k in pushed.values()]
        expected.push(*given, divisor=divisor)

        np.testing.assert_array_equal(a.pull([7, 8, 9]), expected.pull([7, 8, 9]))


@pytest.mark.parametrize("update", [Adam(lr=0.1), Momentum(lr=0.1), FTRL()], ids=str)
def test_on_arrival_each_push_is_a_step(stores, rng, update):
    a, b = stores(2, staleness=None).rows("e", 3, "float64", update=update)
    expected = RowTable(3, "float64", update)
    for turn in range(8):
        keys = rng.integers(0, 5, size=6).astype(np.uint64)
        rows = rng.normal(size=(6, 3))
        (a, b)[turn % 2].push_async(keys, rows).wait()
        expected.push((keys, rows))

    np.testing.assert_array_equal(a.pull(range(6)), expected.pull(range(6)))


def test_set_and_its_limits(stores):
    """Numbers change for all rows; lr_decay only where rows count their steps."""
    workers = stores(2)
    a, b = workers.rows("e", 1, "float64", update=SGD(lr=1.0))
    a.set(lr=0.5)
    for table in (a, b):
        table.push([1], np.ones((1, 1)))
    assert b.pull([1]).tolist() == [[-1.0]]
    (plain, _), (decays, _) = (
        workers.rows(name, 1, update=Adagrad(lr_decay=decay))
        for name, decay in (("plain", 0.0), ("decays", 0.1))
    )
    decays.set(lr_decay=0.2)
    with pytest.raises(commute.SettingError, match="do not count their steps"):
        plain.set(lr_decay=0.2)


# ---- clocks ----


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
@pytest.mark.parametrize("shards", SHARDS)
def test_who_is_counted(ranks, seed, staleness, shards):
    """Rank r adds 1 << 20 r: within the bound, my own always, all at the end. Many messages."""
    size, rounds = 3, 12

    def work(group: Group) -> Any:
        store = group.store("bounds", staleness=staleness)
        e = store.sparse("e", 1, "int64", cache_keys=group.rank == 0)
        rng = np.random.default_rng(seed)  # the same keys on all ranks
        keys = rng.integers(0, 2**64, size=20_000, dtype=np.uint64)
        keys = np.unique(keys)
        one = np.full((len(keys), 1), 1 << 20 * group.rank)
        for number in range(1, rounds + 1):
            if number % 2:
                value = e.push_pull(keys, one)
            else:
                e.push(keys, one)
                value = e.pull(keys)
            counts = [value >> 20 * rank & (1 << 20) - 1 for rank in range(size)]
            assert (counts[group.rank] == number).all()
            if staleness is not None:
                assert min(count.min() for count in counts) >= number - staleness
            if staleness == 0:
                assert (np.array(counts) == number).all()
        store.flush()
        group.barrier()
        return np.unique(e.pull(keys)).tolist()

    every = sum(rounds << 20 * rank for rank in range(size))
    assert ranks(size, shards=shards).values(work) == [[every]] * size


def test_pushes_wait_within_the_bound(stores):
    """As a dense table's: the push that would go further than s + 1 ahead."""
    workers = stores(2, staleness=1)
    a, b = workers.rows("e", 1, "int64")
    one = np.ones((1, 1), "int64")
    pushes = [a.push_async([n], one) for n in range(4)]
    pull = a.pull_async([0, 1, 2, 3])
    workers.settle()
    assert [push.done() for push in pushes] == [True, True, False, False] and not pull.done()
    with pytest.raises(commute.OperationTimeoutError, match="rank 1 has not pushed or ticked it"):
        a.pull([0], timeout=0.05)
    for _ in range(3):
        b.push([9], one)

    assert pull.wait().tolist() == [[1]] * 4 and all(push.done() for push in pushes)


def test_a_table_in_step_and_a_free_one_in_one_loop(stores):
    """Nothing waits that need not: the free one never, whatever the other does."""
    workers = stores(2, staleness=0)
    wa, wb = workers.tables("w", (3,), "int64")
    ea, eb = workers.rows("e", 2, "int64", staleness=None)
    one, row = np.ones(3, "int64"), np.ones((1, 2), "int64")
    for _ in range(3):
        ea.push([5], row)
    wa.push(one)
    waits = wa.pull_async()
    assert ea.push_pull([5], row).tolist() == [[4, 4]] and eb.pull([5]).tolist() == [[4, 4]]
    assert ea.count() == 1
    workers[0].flush()
    workers.settle()
    assert not waits.done()
    eb.push([5], row)
    wb.push(one)

    assert waits.wait().tolist() == [2, 2, 2]


def test_the_loop_of_a_mixed_job(ranks, seed):
    """A dense part in step, embeddings on arrival, a tick at the end."""
    turns = 10

    def work(group: Group) -> Any:
        with group.store("mixed", staleness=0) as store:
            w = store.dense("w", (4,), "float64")
            e = store.sparse("e", 4, "float64", staleness=None)
            rng = np.random.default_rng([seed, group.rank])
            for number in range(1, turns + 1):
                keys = rng.integers(0, 100, size=50)
                rows, ticket = e.pull(keys, ticket=True)
                assert (w.pull() == (number - 1) * group.size).all()
                e.push(ticket, np.ones_like(rows))
                w.push(np.ones(4))
                store.tick()
            w.pull()
            store.flush()
            group.barrier()
            total = e.sum()
            group.barrier()
            return total

    assert ranks(4, shards=3).values(work) == [4 * turns * 50 * 4.0] * 4


@pytest.mark.parametrize("staleness", [0, None])
def test_pieces_and_ticks(stores, staleness):
    """accumulate=True does not count until a push or a tick completes it."""
    workers = stores(2, staleness=staleness)
    a, b = workers.rows("e", 1, "int64")
    one = np.ones((2, 1), "int64")
    a.push([1, 2], one, accumulate=True)
    a.push([2, 3], one, accumulate=True)
    b.push([1, 9], 10 * one)
    workers.settle()
    assert a.info().clock == 0 and a.pull([1, 2, 3]).tolist() == [
        [10 * (staleness is None)],
        [0],
        [0],
    ]
    workers[0].tick()
    assert a.pull([1, 2, 3, 9]).tolist() == [[11], [2], [1], [10]] and a.info().clock == 1
    a.push([1, 1], one, accumulate=True)
    a.push([7, 7], one)
    b.push([], one[:0])

    assert a.pull([1, 7]).tolist() == [[13], [2]] and a.info().clock == 2


@pytest.mark.parametrize("pieces", [False, True], ids=["", "pieces"])
def test_a_slot_that_exceeds_a_message(stores, rng, pieces):
    """Wide rows of one slot travel in pieces, which become one step of the update."""
    (e,) = stores(1, staleness=None).rows("e", 4096, "float64", update=Adam(lr=0.1))
    keys = rng.integers(0, 2**64, size=400_000, dtype=np.uint64)
    mixed = keys ^ keys >> np.uint64(30)  # as core/store/rows.h; 1,024 slots
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    keys = keys[mixed >> np.uint64(54) == 77][:60]
    assert len(keys) == 60
    rows = rng.normal(size=(60, 4096))
    if pieces:
        e.push(keys, rows / 2, accumulate=True)
        e.push(keys, rows / 2)
    else:
        e.push(keys, rows)
    expected = RowTable(4096, "float64", Adam(lr=0.1))
    expected.push((keys, rows))

    np.testing.assert_array_equal(e.pull(keys), expected.pull(keys))
    np.testing.assert_array_equal(e.push_pull(keys, 0 * rows)[:2].shape, (2, 4096))


# ---- drops ----


def test_a_drop_comes_after_my_round_and_before_my_pull(stores):
    """In step: what I pushed last is dropped too, and what I push next is not."""
    workers = stores(2)
    a, b = workers.rows("e", 1, "int64")
    one = np.ones((2, 1), "int64")
    a.push([1, 2], one)
    before = a.pull_async([1, 2])
    a.drop([1])
    after = a.pull_async([1, 2])
    workers.settle()
    assert not before.done() and not after.done()
    b.push([1, 2], 10 * one)
    assert before.wait().tolist() == [[11], [11]] and after.wait().tolist() == [[0], [11]]
    a.push([1, 2], one)
    b.push([3, 3], one)

    assert b.pull([1, 2, 3]).tolist() == [[1], [12], [2]]


def test_a_drop_does_not_wait_for_what_is_set_later(stores):
    """Rank 0 has ticked ahead and sets something; rank 1's drop belongs to an earlier round."""
    workers = stores(2)
    a, b = workers.rows("e", 1, "float64", update=SGD(lr=1.0))
    for _ in range(5):
        workers[0].tick()
    a.set(lr=2.0)
    b.push([1], np.full((1, 1), -1.0))
    b.drop([1])
    b.push([1], np.full((1, 1), -8.0))
    assert b.pull([1]).tolist() == [[8.0]]
    for _ in range(4):
        workers[1].tick()
    b.push([2], np.full((1, 1), -1.0))
    workers[0].tick()

    assert b.pull([1, 2]).tolist() == [[8.0], [2.0]]


# ---- who goes ----


def test_leaving_and_loss(stores):
    """Who leaves is not waited for; who is lost in step is named."""
    workers = stores(3)
    a, b, c = workers.rows("e", 1, "int64")
    one = np.ones((1, 1), "int64")
    c.push([1], one)
    workers[2].leave()
    with pytest.raises(commute.ClosedError):
        c.push([1], one)
    a.push([1], one)
    b.push([1], one)
    assert a.pull([1]).tolist() == [[3]]
    b.push([1], one)
    assert a.push_pull([1], one).tolist() == [[5]]
    a.push([1], one)
    waits = a.pull_async([1])
    workers.lose(1)
    with pytest.raises(commute.PeerLostError, match="rank 1 was lost"):
        waits.wait()
    with pytest.raises(commute.PeerLostError):
        a.push_pull([1], one)


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_going_on_without_the_lost(stores, staleness):
    """on_loss="continue": what arrived whole stays; pieces of what it built do not."""
    workers = stores(2, staleness=staleness, on_loss="continue")
    a, b = workers.rows("e", 1, "int64")
    one = np.ones((1, 1), "int64")
    b.push([1], 10 * one)
    b.push([2], one, accumulate=True)
    workers.settle()
    workers.lose(1)
    for _ in range(4):
        value = a.push_pull([1, 2], np.ones((2, 1), "int64"))

    assert value.tolist() == [[14], [4]]


# ---- admission and expiry ----


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("admit", [1, 2, 3, 15])
def test_admission(stores, rng, admit, width):
    """A row is made at its key's so many-th push; what came before is dropped."""
    (e,) = stores(1, staleness=None).rows("e", width, "int64", admit=admit, init=100)
    keys = np.unique(rng.integers(0, 2**64, size=5000, dtype=np.uint64))
    for turn in range(1, admit + 3):
        e.push(np.repeat(keys, 2), np.ones((2 * len(keys), width), "int64"))
        kept = max(0, turn - admit + 1)

        assert e.count() == (len(keys) if kept else 0)
        assert (e.pull(keys) == 100 + 2 * kept).all()


def test_admission_forgets_rare_keys(stores, rng):
    """However many keys come once, none gets a row before its second time, nearly."""
    (e,) = stores(1, staleness=None).rows("e", 1, admit=2)
    often = np.arange(10, dtype=np.uint64)
    for _ in range(5):
        rare = rng.integers(0, 2**64, size=200_000, dtype=np.uint64)
        e.push(np.concatenate([rare, often]), np.ones(200_010, "float32"))

    assert 10 <= e.count() < 10 + 1000 and (e.pull(often) == 4).all()


@pytest.mark.parametrize("staleness", [0, 2, None])
@pytest.mark.parametrize("width", [1, 8])
def test_expiry(stores, staleness, width):
    """Rows that nobody pushes go; those that somebody pushes stay. Tickets notice."""
    workers = stores(2, staleness=staleness)
    a, b = workers.rows("e", width, "int64", expire_after=3)
    keys = np.arange(200)
    one = np.ones((200, width), "int64")
    a.push(keys, one)
    b.push(keys[:0], one[:0])
    _, ticket = a.pull(keys, ticket=True)
    for _ in range(8):
        a.push(keys[:20], one[:20])
        b.push(keys[10:30], one[:20])
    left = np.where(keys < 10, 9, np.where(keys < 20, 17, np.where(keys < 30, 9, 0)))
    for store in workers:
        store.flush()
    assert a.count() == 30 and (a.pull(ticket) == left[:, None]).all()
    a.push(ticket, one)
    b.push(keys[:0], one[:0])
    assert (b.pull(keys) == left[:, None] + 1).all() and b.count() == 200
    for _ in range(12):  # by ticks alone
        workers[0].tick()
        workers[1].tick()
    for store in workers:
        store.flush()
    assert a.count() == 0 and not a.pull(ticket).any()


def test_expiry_in_step_goes_by_rounds(ranks, seed):
    """Every shard drops in the same round, however far ahead some have ticked."""

    def work(group: Group) -> list[Any]:
        store = group.store("rounds", staleness=0, deterministic=True)
        e = store.sparse("e", 2, "float64", expire_after=2)
        rng = np.random.default_rng([seed, group.rank])
        seen = []
        for _ in range(12):
            keys = rng.integers(0, 40, size=5)
            e.push(keys, np.ones((5, 2)))
            seen.append(e.pull(range(40)).tobytes())
        return seen

    first, second, third = ranks(3, shards=5).values(work)
    assert first == second == third


def test_both_are_replayed(stores, rng):
    """Admission, expiry and drops are ops: the shards' replays are compared at the end."""
    a, b = (workers := stores(2)).rows("e", 5, admit=2, expire_after=2, update=Adam(lr=0.1))
    for turn in range(20):
        for table in (a, b):
            keys = rng.integers(0, 300, size=200)
            table.push(keys, rng.normal(size=(200, 5)).astype("float32"))
        if turn % 5 == 2:
            a.drop(rng.integers(0, 300, size=50))
    for store in workers:
        store.flush()

    assert 0 < a.count() < 300


# ---- the wire ----


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("cached", [False, True])
def test_half_the_bytes(stores, rng, wire, cached):
    """Values travel rounded to the wire's numbers, both ways; rows are kept in float32."""
    import ml_dtypes

    kind = np.dtype("float16" if wire == "float16" else ml_dtypes.bfloat16)
    (e,) = stores(1, staleness=None).rows("e", 3, wire=wire, cache_keys=cached)
    keys = rng.permutation(4000).astype(np.uint64)
    rows = rng.normal(size=(4000, 3)).astype("float32")
    rounded = rows.astype(kind).astype("float32")
    twice = (rounded + rounded).astype(kind).astype("float32")
    for _ in range(2):
        e.push(keys, rows)

    np.testing.assert_array_equal(e.pull(keys), twice)
    found = {int(k): r for block, values in e.items() for k, r in zip(block, values, strict=True)}
    np.testing.assert_array_equal([found[int(k)] for k in keys], rounded + rounded)


def sent_bytes(table: Any) -> int:
    return table._endpoint.sent_bytes()


@pytest.mark.parametrize("verb", ["push", "pull", "push_pull"])
def test_remembered_keys_save_bytes(stores, rng, verb):
    """At least 60 % of all that is sent, of rows of one element, from the second time on."""
    workers = stores(1, staleness=None)
    keys = rng.integers(0, 2**64, size=20_000, dtype=np.uint64)
    rows = np.ones((20_000, 1), "float32")
    given = [keys] if verb == "pull" else [keys, rows]
    sent = {}
    for cached in (False, True):
        (e,) = workers.rows(f"e{cached}", 1, cache_keys=cached)
        getattr(e, verb)(*given)
        workers[0].flush()
        before = sent_bytes(e)
        for _ in range(5):
            getattr(e, verb)(*given)
        workers[0].flush()
        sent[cached] = sent_bytes(e) - before
    plain = len(np.unique(keys)) * (8 if verb == "pull" else 12)

    print(sent)
    assert sent[False] > 5 * plain and sent[True] < 0.4 * sent[False]


def test_a_ticket_saves_the_keys_too(stores, rng):
    (e,) = stores(1, staleness=None).rows("e", 1)
    keys = np.unique(rng.integers(0, 2**64, size=20_000, dtype=np.uint64))
    _, ticket = e.pull(keys, ticket=True)
    before = sent_bytes(e)
    e.push_async(ticket, np.ones((len(keys), 1), "float32")).wait()

    assert sent_bytes(e) - before < 4.5 * len(keys) and (e.pull(ticket) == 1).all()


@pytest.mark.parametrize("cached", [False, True])
def test_distinct_keys_that_come_again(stores, rng, cached):
    """In another ticket they are known where the table remembers keys, and only there."""
    (e,) = stores(1, staleness=None).rows("e", 1, cache_keys=cached)
    keys = np.unique(rng.integers(0, 2**64, size=20_000, dtype=np.uint64))
    sent = []
    for _ in range(2):
        before = sent_bytes(e)
        e.pull(e.distinct(keys)[0])
        sent.append((sent_bytes(e) - before) / len(keys))

    assert sent[0] > 8 and (sent[1] < 0.5 if cached else sent[1] > 8)


def test_a_ticket_after_its_last_push(stores, rng):
    """The servers have forgotten its keys; who uses it all the same sends them again."""
    (e,) = stores(1, staleness=None).rows("e", 1)
    keys = np.unique(rng.integers(0, 2**64, size=20_000, dtype=np.uint64))
    ones = np.ones((len(keys), 1), "float32")
    _, ticket = e.pull(keys, ticket=True)
    sent = []
    for last in (True, False, False):
        before = sent_bytes(e)
        e.push(ticket, ones, last=last)
        e._store.flush()
        sent.append((sent_bytes(e) - before) / len(keys))

    assert sent[0] < 4.5 and 12 < sent[1] < 12.5 and sent[2] < 4.5
    assert (e.pull(ticket) == 3).all()


def test_lists_that_the_servers_have_forgotten(stores, rng):
    """More lists than they remember: the keys are sent again, and nothing is lost or doubled."""
    (e,) = stores(1, staleness=None).rows("e", 1, "int64", cache_keys=True)
    lists = [rng.integers(0, 2**64, size=150_000, dtype=np.uint64) for _ in range(25)]
    assert sum(len(keys) * 12 for keys in lists) > 2 * (16 << 20)
    tickets = [e.pull(keys, ticket=True)[1] for keys in lists]
    for _ in range(2):
        for ticket in tickets:
            e.push(ticket, np.ones((len(ticket), 1), "int64"))

    for keys in (lists[0], lists[12], lists[24]):
        _, where, times = np.unique(keys, return_inverse=True, return_counts=True)
        assert (e.pull(keys)[:, 0] == 2 * times[where]).all()
