# SPDX-License-Identifier: Apache-2.0
"""Semirings: `push(x, scale=c)` contributes c (x) x; shortest paths and reachability by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commute import Group, Semiring


def test_scale_multiplies(together):
    """Without a semiring `scale` is a factor, for every kind of push."""

    def work(group: Group) -> list[Any]:
        store = group.store()
        w = store.dense("w", (4,), "float32")
        x = np.arange(4, dtype="float32")
        w.push(x, scale=0.5)
        seen = [w.pull(), w.push_pull(x, scale=2)]
        w.push_async(x, scale=np.float32(-1.5)).wait()
        seen.append(w.pull())
        seen.append(w.push_pull_async([x, x], scale=0.25).wait())
        assert x.tolist() == [0, 1, 2, 3]
        return seen

    seen = together.values(work)
    factors = np.cumsum([0.5, 2, -1.5, 0.5]) * len(seen)
    for rank_saw in seen:
        for found, factor in zip(rank_saw, factors, strict=True):
            np.testing.assert_array_equal(found, np.arange(4) * factor)


def test_scale_comes_before_combining_devices(together):
    """`scale` is done first: min(-1 * 1, -1 * 2), not -1 * min(1, 2)."""

    def work(group: Group) -> Any:
        w = group.store().dense("w", (1,), "float64", update="min", init=9.0)
        return w.push_pull([np.array([1.0]), np.array([2.0])], scale=-1.0)

    assert {found.item() for found in together.values(work)} == {-2.0}


def random_graph(rng: Any, size: int, edges: int) -> dict[tuple[int, int], int]:
    """Weights by edge."""
    ends = rng.integers(0, size, size=(edges, 2))
    return {(int(u), int(v)): int(rng.integers(1, 50)) for u, v in ends if u != v}


def floyd_warshall(graph: dict[tuple[int, int], int], size: int) -> Any:
    far = np.full((size, size), np.inf)
    np.fill_diagonal(far, 0)
    for (u, v), weight in graph.items():
        far[u, v] = weight
    for k in range(size):
        far = np.minimum(far, far[:, k, None] + far[k])
    return far


def reachable(graph: dict[tuple[int, int], int], size: int) -> Any:
    seen = np.eye(size, dtype=bool)
    for start in range(size):
        queue = [start]
        while queue:
            here = queue.pop()
            new = [v for u, v in graph if u == here and not seen[start, v]]
            seen[start, new] = True
            queue += new
    return seen


def relax(
    group: Group,
    graph: dict[tuple[int, int], int],
    first: Any,
    update: Semiring,
    scale: Callable[[int], int],
    staleness: int | None,
) -> Any:
    """Row u is the table of vertex u; an edge (u, v) contributes its weight (x) row v to row u."""
    store = group.store("graph", staleness=staleness)
    dtype = str(first.dtype)
    rows = [
        store.dense(f"row {u}", row.shape, dtype, update=update, init=row)
        for u, row in enumerate(first)
    ]
    mine = [edge for i, edge in enumerate(sorted(graph)) if i % group.size == group.rank]
    for _ in rows:
        now = [row.pull(fresh=True) for row in rows]
        for u, v in mine:
            rows[u].push(now[v], scale=scale(graph[u, v]), accumulate=True)
        store.tick()
        store.flush()
        group.barrier()
    return np.stack([row.pull(fresh=True) for row in rows])


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_shortest_paths_by_min_plus(together, seed, staleness):
    """As Floyd and Warshall find them; the minimum does not mind who is late."""
    graph = random_graph(np.random.default_rng(seed), 9, 24)
    first = np.full((9, 9), np.inf)
    np.fill_diagonal(first, 0)
    seen = together.values(
        lambda group: relax(
            group, graph, first, Semiring(add="min", mul="+"), lambda weight: weight, staleness
        )
    )

    for found in seen:
        np.testing.assert_array_equal(found, floyd_warshall(graph, 9))


@pytest.mark.parametrize("staleness", [0, None])
def test_reachability_by_or_and(together, seed, staleness):
    """On 0 and 1, as a search finds it."""
    graph = random_graph(np.random.default_rng(seed), 9, 14)
    seen = together.values(
        lambda group: relax(
            group,
            graph,
            np.eye(9, dtype="uint8"),
            Semiring(add="or", mul="and"),
            lambda weight: 1,
            staleness,
        )
    )

    for found in seen:
        np.testing.assert_array_equal(found, reachable(graph, 9))


@pytest.mark.parametrize("mul", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("add", ["sum", "prod", "min", "max"])
def test_semiring_agrees_with_numpy(together, seed, add, mul):
    """value = value (+) (c (x) pushed), for each pair of operations."""
    operations = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}

    def row(rank: int) -> tuple[Any, int]:
        rng = np.random.default_rng([seed, rank])
        return rng.integers(-3, 4, size=900), int(rng.integers(-3, 4))

    def work(group: Group) -> Any:
        w = group.store().dense("w", (900,), "int64", update=Semiring(add, mul), init=2)
        pushed, scale = row(group.rank)
        return w.push_pull(pushed, scale=scale)

    seen = together.values(work)
    value = np.full(900, 2)
    for rank in range(len(seen)):
        pushed, scale = row(rank)
        value = operations[add](value, operations[mul](scale, pushed))

    assert [found.tolist() for found in seen] == [value.tolist()] * len(seen)
