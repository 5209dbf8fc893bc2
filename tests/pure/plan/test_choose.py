# SPDX-License-Identifier: Apache-2.0
"""The choice of an algorithm, and what is refused."""

import pytest

from commute.plan import (
    Collective,
    algorithms,
    build,
    candidates,
    choose,
    shared_bounds,
    tile_bytes,
    verify,
)


@pytest.mark.parametrize(
    ("ranks", "nbytes", "place", "expected"),
    [
        (2, 64 << 10, "tcp", "recursive-doubling"),
        (2, (64 << 10) + 1, "tcp", "halving-doubling"),
        (3, 8, "tcp", "recursive-doubling"),
        (4, 8 << 10, "tcp", "recursive-doubling"),
        (4, (8 << 10) + 1, "tcp", "halving-doubling"),
        (16, 16 << 10, "tcp", "recursive-doubling"),
        (16, (16 << 10) + 1, "tcp", "halving-doubling"),
        (6, 64 << 10, "tcp", "circulant"),
        (8, (512 << 10) - 1, "tcp", "halving-doubling"),
        (8, 512 << 10, "tcp", "ring"),
        (2, 128 << 10, "tcp", "ring"),
        (8, 64 << 20, "tcp", "ring"),
        (2, 64 << 10, "loopback", "recursive-doubling"),
        (4, 8, "loopback", "gather-to-root"),
        (16, 64 << 10, "loopback", "gather-to-root"),
        (4, (64 << 10) + 1, "loopback", "halving-doubling"),
        (4, 64 << 20, "loopback", "halving-doubling"),
        (6, 64 << 20, "loopback", "circulant"),
    ],
)
def test_allreduce_by_size_and_place(ranks: int, nbytes: int, place: str, expected: str) -> None:
    """Few steps for small arrays, few bytes for large ones, few changes of process on one host."""
    assert choose("allreduce", ranks, nbytes, place) == expected


@pytest.mark.parametrize(
    ("collective", "ranks", "nbytes", "place", "expected"),
    [
        ("broadcast", 8, 64 << 10, "tcp", "binomial"),
        ("broadcast", 2, 64 << 20, "tcp", "binomial"),
        ("broadcast", 8, 64 << 20, "loopback", "binomial"),
        ("broadcast", 3, (64 << 10) + 1, "tcp", "chain"),
        ("broadcast", 16, 64 << 20, "tcp", "chain"),
        ("broadcast", 17, 64 << 20, "tcp", "double-tree"),
        ("reduce", 4, (64 << 10) - 1, "tcp", "binomial"),
        ("reduce", 4, 64 << 10, "tcp", "chain"),
        ("reduce", 32, (128 << 10) - 1, "tcp", "binomial"),
        ("reduce", 32, 128 << 10, "tcp", "chain"),
        ("reduce", 2, 64 << 20, "tcp", "binomial"),
        ("reduce", 8, 64 << 20, "loopback", "binomial"),
        ("allgather", 4, (64 << 10) - 1, "tcp", "circulant"),
        ("allgather", 4, 64 << 10, "tcp", "ring"),
        ("allgather", 2, 1 << 10, "tcp", "circulant"),
        ("reduce_scatter", 4, 255 << 10, "tcp", "circulant"),
        ("reduce_scatter", 4, 256 << 10, "tcp", "ring"),
        ("reduce_scatter", 4, 64 << 20, "loopback", "circulant"),
        ("alltoall", 7, 8, "tcp", "pairwise"),
        ("alltoall", 8, 64 << 10, "tcp", "bruck"),
        ("alltoall", 8, 65 << 10, "tcp", "pairwise"),
        ("gather", 16, 8, "tcp", "linear"),
        ("scatter", 7, 8, "tcp", "linear"),
        ("scatter", 16, 128 << 10, "tcp", "binomial"),
        ("scatter", 16, 129 << 10, "tcp", "linear"),
        ("barrier", 8, 0, "tcp", "dissemination"),
        ("gather", 4, 8, "memory", "shared"),
        ("alltoall", 4, 8, "memory", "shared"),
    ],
)
def test_other_collectives_by_size_and_place(
    collective: str, ranks: int, nbytes: int, place: str, expected: str
) -> None:
    """Trees and few messages where steps count, each byte but once where bytes do."""
    assert choose(collective, ranks, nbytes, place) == expected


@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize("place", ["tcp", "loopback", "memory"])
def test_every_choice_can_be_built(collective: Collective, place: str) -> None:
    """What is chosen exists, is a candidate there, and is right."""
    for ranks in (1, 2, 5):
        for nbytes in (0, 1 << 30):
            name = choose(collective, ranks, nbytes, place)

            assert name in candidates(collective, place)
            verify(build(collective, name, ranks))


def test_shared_memory_is_needed_for_one_shot() -> None:
    """Over TCP there are no outboxes to read."""
    assert "one-shot" in candidates("allreduce", "memory")
    assert "one-shot" not in candidates("allreduce", "tcp")
    assert choose("allreduce", 4, 8, "memory", algorithm="one-shot") == "one-shot"
    with pytest.raises(ValueError, match=r"'one-shot' needs shared memory .* choose from ring"):
        choose("allreduce", 4, 8, "tcp", algorithm="one-shot")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 33])
@pytest.mark.parametrize("nbytes", [8, 1 << 30])
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_deterministic_is_proved(collective: str, ranks: int, nbytes: int) -> None:
    """Whatever is reduced, of whatever size, adds up in rank order, by the verifier's word."""
    root = ranks // 2 if collective == "reduce" else 0
    short = nbytes == 8 and collective == "allreduce"
    for place, halves in (("tcp", False), ("tcp", True), ("memory", True)):
        name = choose(
            collective, ranks, nbytes, place, deterministic=True, halves=halves, root=root
        )

        assert name == ("gather-to-root" if short else "chain")
        assert verify(build(collective, name, ranks, root)).rank_order


@pytest.mark.parametrize("name", ["ring", "tree", "halving-doubling"])
def test_forcing_an_unordered_plan_is_refused(name: str) -> None:
    """deterministic=True and an algorithm that is not: the error lists those that are."""
    with pytest.raises(ValueError, match=rf"'{name}' on 4 ranks .* choose from gather-to-root"):
        choose("allreduce", 4, 8, "tcp", deterministic=True, algorithm=name)


@pytest.mark.parametrize("collective", ["barrier", "broadcast", "allgather"])
def test_deterministic_where_nothing_is_added(collective: str) -> None:
    """What adds up nothing is deterministic as it is."""
    assert choose(collective, 4, 8, "tcp", deterministic=True) in algorithms(collective)


def test_unknown_names() -> None:
    """Wrong names are answered with the right ones."""
    with pytest.raises(ValueError, match="'rink' is not known; choose from ring, tree"):
        choose("allreduce", 4, 8, "tcp", algorithm="rink")
    with pytest.raises(ValueError, match="one of tcp, loopback, memory, arrays, got 'mars'"):
        choose("allreduce", 4, 8, "mars")


def test_tile_holds_chunks_of_256_kib() -> None:
    """A tile has as many chunks as the plan, so more ranks on a ring have larger tiles."""
    assert tile_bytes(build("allreduce", "ring", 4)) == 8 * (256 << 10)
    assert tile_bytes(build("broadcast", "binomial", 4)) == 256 << 10


@pytest.mark.parametrize(("collective", "name"), [("alltoall", "bruck"), ("gather", "binomial")])
def test_scratch_is_bounded(collective: str, name: str) -> None:
    """Plans with a block of SCRATCH for each rank, or more, have smaller tiles."""
    for ranks in (2, 8, 128):
        plan = build(collective, name, ranks)

        assert tile_bytes(plan) * plan.blocks[2] <= 16 << 20
        assert tile_bytes(plan) >= 16 << 10


def test_arrays_that_all_reach() -> None:
    """Large ones are worked on where they are, unless something else is asked for."""
    assert choose("allreduce", 4, 1 << 20, "arrays") == "direct"
    assert choose("broadcast", 4, 1 << 20, "arrays") == "direct"
    assert choose("allreduce", 4, 1 << 20, "arrays", deterministic=True) == "direct"
    assert choose("allreduce", 4, 1 << 20, "arrays", deterministic=True, halves=True) != "direct"
    assert choose("allreduce", 4, 8, "arrays") == "line"
    assert choose("allgather", 4, 1 << 20, "arrays") == "shared"
    assert choose("allreduce", 4, 1 << 20, "arrays", algorithm="ring") == "ring"
    assert "direct" not in candidates("allreduce", "memory")
    with pytest.raises(ValueError, match=r"'direct' needs arrays of empty\(\)"):
        choose("allreduce", 4, 1 << 20, "memory", algorithm="direct")


def test_memory_that_others_may_read() -> None:
    """Blocks are fetched where the host allows it, unless they are small."""
    assert choose("scatter", 4, 1 << 20, "memory", fetches=True) == "fetch"
    assert choose("alltoall", 4, 1 << 20, "memory", fetches=True) == "fetch"
    assert choose("alltoall", 4, 1 << 20, "arrays", fetches=True) == "fetch"
    assert choose("alltoall", 4, 1 << 10, "memory", fetches=True) == "shared"
    assert choose("alltoall", 4, 1 << 20, "memory") == "shared"
    assert choose("alltoall", 4, 1 << 20, "tcp", fetches=True) == "pairwise"
    assert choose("allgather", 4, 1 << 20, "memory", fetches=True) == "shared"
    with pytest.raises(ValueError, match=r"'fetch' needs .* read each other's processes; choose"):
        choose("alltoall", 4, 1 << 20, "memory", algorithm="fetch")


@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize("collective", Collective)
def test_bounds_of_choices_in_shared_memory(collective: Collective, fetches: bool) -> None:
    """Between two bounds the answer is the same, and beyond each of them it is another."""
    bounds = shared_bounds(collective, fetches)
    sizes = [0, *range(1, 300_000, 777), 1 << 30, *(b + by for b in bounds for by in (-1, 0, 1))]

    def chosen(nbytes: int) -> str:
        return choose(collective, 4, nbytes, "memory", fetches=fetches)

    def number(nbytes: int) -> int:
        return next(i for i, bound in enumerate(bounds) if nbytes <= bound)

    assert bounds == sorted(bounds)
    names = {(number(size), chosen(size)) for size in sizes if size <= bounds[-1]}
    assert len(names) == len(bounds)
    assert all(chosen(low) != chosen(low + 1) for low in bounds[:-1])
