# SPDX-License-Identifier: Apache-2.0
"""The choice of an algorithm, and what is refused."""

import pytest

from commute.plan import Collective, algorithms, build, candidates, choose, tile_bytes, verify


@pytest.mark.parametrize(
    ("ranks", "nbytes", "place", "expected"),
    [
        (2, 8, "tcp", "gather-to-root"),
        (4, 16 << 10, "tcp", "gather-to-root"),
        (4, (16 << 10) + 1, "tcp", "halving-doubling"),
        (5, 8, "tcp", "halving-doubling"),
        (8, 64 << 10, "tcp", "halving-doubling"),
        (2, (64 << 10) + 1, "tcp", "ring"),
        (8, 64 << 20, "tcp", "ring"),
        (4, 8, "loopback", "gather-to-root"),
        (4, 64 << 20, "loopback", "halving-doubling"),
        (6, 64 << 20, "loopback", "ring"),
    ],
)
def test_allreduce_by_size_and_place(ranks: int, nbytes: int, place: str, expected: str) -> None:
    """Few steps for small arrays, few bytes for large ones, few changes of process on one host."""
    assert choose("allreduce", ranks, nbytes, place) == expected


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
    with pytest.raises(ValueError, match="place must be one of tcp, loopback, memory, got 'mars'"):
        choose("allreduce", 4, 8, "mars")


def test_tile_holds_chunks_of_256_kib() -> None:
    """A tile has as many chunks as the plan, so more ranks on a ring have larger tiles."""
    assert tile_bytes(build("allreduce", "ring", 4)) == 8 * (256 << 10)
    assert tile_bytes(build("broadcast", "binomial", 4)) == 256 << 10
