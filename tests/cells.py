# SPDX-License-Identifier: Apache-2.0
"""The calls of a group as a product: what can be chosen of a call, and what it must give.

    link     "memory" (threads), "shared" (processes on one host) or "tcp" (processes and messages)
    way      a call and the algorithm that it is forced to; None: the one that is chosen
    ranks    1 to 9
    length   "0", "1", "p-1", "p", "p+1" (p is the number of ranks), "odd", "large": some tiles
    dtype    by name
    op       "none" of calls that move only
    into     where the result goes: "x" itself, "shared x" of empty(), a "new" array, or "out"

A cell is a value of each for one link. `in_full` has all cells of a kind, `covered` those of a
seeded cover, and `check` makes the call of a cell and compares it with NumPy. Inputs are numbers
whose sums and products are exact in any order, so results are compared by bits.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from commute import Group, plan
from cover import Part, cover, product
from reductions import BOOL, COMPLEX, DTYPES, INTEGERS, OPS, fold, has_meaning

LINKS = ("memory", "shared", "tcp")
SIZES = range(1, 10)
CELLS_MAX = 3000  # of the covers of all links
REDUCING = ("allreduce", "reduce", "reduce_scatter")
IN_PLACE = ("allreduce", "reduce", "broadcast")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
TALL = ("reduce_scatter", "scatter", "alltoall")  # x has a leading axis
CALLS = (*REDUCING, "broadcast", "allgather", "gather", "scatter", "alltoall")
ODD = 1023  # the longest of the small: of complex128 it fits a line
LARGE_BYTES = 768 << 10
LARGE_BLOCK_BYTES = 288 << 10  # of the calls in which each rank has many blocks
POOL = 65_521  # numbers of which inputs are made; a prime, so that no tile begins as another does


class Way(NamedTuple):
    call: str
    algorithm: str | None

    def __str__(self) -> str:
        return f"{self.call}-{self.algorithm or 'chosen'}"


class Cell(NamedTuple):
    way: Way
    ranks: int
    length: str
    dtype: str
    op: str
    into: str

    @property
    def elements(self) -> int:
        """Of a block: of x, or of one row where x has a leading axis."""
        known = {"p-1": self.ranks - 1, "p": self.ranks, "p+1": self.ranks + 1, "odd": ODD}
        if self.length == "large":
            return _large_bytes(self.way, self.ranks) // np.dtype(self.dtype).itemsize + 1001
        return known[self.length] if self.length in known else int(self.length)


WAYS = [Way(call, by) for call in CALLS for by in (*plan.algorithms(call), None)]
AXES: dict[str, Sequence[Any]] = {
    "way": WAYS,
    "ranks": SIZES,
    "length": ("0", "1", "p-1", "p", "p+1", "odd", "large"),
    "dtype": [dtype.name for dtype in DTYPES],
    "op": (*OPS, "none"),
    "into": ("x", "shared x", "new", "out"),
}


def fits(link: str, part: Part) -> bool:
    """Whether there is such a call; what the part does not name may be anything."""
    way, ranks, length = part.get("way"), part.get("ranks"), part.get("length")
    dtype, op, into = part.get("dtype"), part.get("op"), part.get("into")
    if (ranks, length) in ((1, "p-1"), (1, "p"), (2, "p-1")):  # which are 0 and 1 already
        return False
    if dtype and op and op != "none" and not has_meaning(np.dtype(dtype), op):
        return False
    if way is None:
        return True
    if op and (op != "none") != (way.call in REDUCING):
        return False
    if into in ("x", "shared x", "new") and (into != "new") != (way.call in IN_PLACE):
        return False
    if way.algorithm == "line" and length == "large":
        return False
    if way.algorithm == plan.DIRECT and (into not in (None, "shared x") or length == "0"):
        return False  # of nothing, nobody has a part
    return way.algorithm in (None, *_algorithms(link, way.call, ranks or SIZES[-1]))


@functools.cache
def _algorithms(link: str, call: str, ranks: int) -> tuple[str, ...]:
    # A process that is alone has nobody to share memory with; a thread has its own outbox.
    alone = link == "shared" and ranks == 1
    # Whether processes may read each other's memory is up to the host: test_fetch asks.
    threads = link == "memory"
    return plan.candidates(call, "loopback" if link == "tcp" or alone else "arrays", threads)


@functools.cache
def _large_bytes(way: Way, ranks: int) -> int:
    """More than a tile of its plan; of short tiles three, so that slots are used again."""
    most = LARGE_BYTES if way.call in IN_PLACE else LARGE_BLOCK_BYTES
    if way.algorithm in (None, plan.DIRECT):
        return most
    tile = plan.tile_bytes(plan.build(way.call, way.algorithm, ranks))
    return min(3 * tile, max(tile, most))


def in_full(link: str, **part: Any) -> Iterator[Cell]:
    """All cells of a link that have these values."""
    if fits(link, part):
        for cell in product(AXES, functools.partial(fits, link), part):
            yield Cell(**cell)


@functools.cache
def covered(link: str, seed: int) -> list[Cell]:
    """Of each pair of values at least one cell; the same for the same seed."""
    rng = np.random.default_rng([seed, LINKS.index(link)])
    return [Cell(**cell) for cell in cover(AXES, functools.partial(fits, link), rng)]


def written(cells: Sequence[Cell]) -> str:
    """As text, for another process."""
    return json.dumps(cells)


def read(text: str) -> list[Cell]:
    return [Cell(Way(*way), *rest) for way, *rest in json.loads(text)]


def check(group: Group, cell: Cell, number: int, seed: int) -> None:
    """Makes the call on this rank; its result must be NumPy's, and nothing else may be touched.

    number: of the cell among those that are checked; it decides the inputs and the root.
    """
    with _computing:
        root, parts, results = _case(cell, number, seed)
    mine, wanted = parts[group.rank], results[group.rank]
    x, out = _brought(group, cell, mine, root), _room(group, cell, root)
    found = _called(group, cell, x, out, root)
    told = f"{cell}, number {number}, root {root}, rank {group.rank}"

    assert _same_bits(found, wanted), f"{told}: {_difference(found, wanted)}"
    if cell.into == "out":
        assert found is out, f"{told}: the result is not in out="
    elif cell.way.call in IN_PLACE:
        assert found is x, f"{told}: the result is not in x"
    if cell.way.call not in IN_PLACE or cell.into == "out":
        assert x is None or _same_bits(x, mine), f"{told}: x has changed"


class Case(NamedTuple):
    """What the ranks bring along, and what each has in the end."""

    root: int
    parts: list[np.ndarray]
    results: Sequence[np.ndarray | None]


# Ranks that are threads need the same: the first computes it, and those that are close to it wait.
_computing = threading.Lock()


@functools.lru_cache(maxsize=4)
def _case(cell: Cell, number: int, seed: int) -> Case:
    rng = np.random.default_rng([seed, number])
    root = int(rng.integers(cell.ranks))
    parts = [_contribution(cell, seed, rng) for _ in range(cell.ranks)]
    return Case(root, parts, _results(cell, parts, root))


def _contribution(cell: Cell, seed: int, rng: np.random.Generator) -> np.ndarray:
    pool = _pool(cell.dtype, cell.op == "prod", seed)
    shape = (cell.ranks, cell.elements) if cell.way.call in TALL else (cell.elements,)
    return np.resize(pool[rng.integers(POOL // 2) :], shape)


@functools.cache
def _pool(name: str, factors: bool, seed: int) -> np.ndarray:
    rng, dtype = np.random.default_rng(seed), np.dtype(name)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, POOL, dtype, endpoint=True)
    if dtype == BOOL:
        return rng.random(POOL) < 0.5
    if dtype in COMPLEX:  # two primes: their products are exact, and no part is 0 or -0
        return rng.choice([2 + 1j, 3 + 2j], POOL).astype(dtype)
    if factors:  # no zeros: the sign of such a product depends on the order
        return rng.choice([-2.0, -1.0, 0.5, 1.0, 2.0], POOL).astype(dtype)
    return rng.integers(-8, 8, POOL, endpoint=True).astype(dtype)


def _brought(group: Group, cell: Cell, mine: np.ndarray, root: int) -> np.ndarray | None:
    if cell.way.call == "scatter" and group.rank != root:
        return None
    if cell.into != "shared x":
        return mine.copy()
    x = group.empty(mine.shape, mine.dtype)
    x[...] = mine
    return x


def _room(group: Group, cell: Cell, root: int) -> np.ndarray | None:
    """What is passed as out=, of zeros."""
    call = cell.way.call
    if cell.into != "out" or (call == "gather" and group.rank != root):
        return None
    tall = call in ("allgather", "gather", "alltoall")
    return np.zeros((cell.ranks, cell.elements) if tall else cell.elements, cell.dtype)


def _called(group: Group, cell: Cell, x: Any, out: Any, root: int) -> Any:
    options: dict[str, Any] = {"algorithm": cell.way.algorithm}
    if cell.way.call in REDUCING:
        options["op"] = cell.op
    if cell.way.call in ROOTED:
        options["root"] = root
    if out is not None:
        options["out"] = out
    return getattr(group, cell.way.call)(x, **options)


def _results(cell: Cell, parts: list[np.ndarray], root: int) -> Sequence[np.ndarray | None]:
    call, everyone = cell.way.call, range(cell.ranks)
    if call == "broadcast":
        return [parts[root] for _ in everyone]
    if call == "scatter":
        return parts[root]
    if call == "alltoall":
        return np.stack(parts, axis=1)
    if call in ("allgather", "gather"):
        whole = np.stack(parts)
        return [whole if call == "allgather" or rank == root else None for rank in everyone]
    total = fold(cell.op, parts)
    if call == "reduce":  # the others' x is left alone, and so is their out=
        others = [np.zeros_like(part) for part in parts] if cell.into == "out" else parts
        return [total if rank == root else others[rank] for rank in everyone]
    return total if call == "reduce_scatter" else [total for _ in everyone]


def _same_bits(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _difference(found: np.ndarray | None, wanted: np.ndarray | None) -> str:
    if found is None or wanted is None or found.shape != wanted.shape:
        return f"expected {wanted!r}, got {found!r}"
    at = np.flatnonzero(np.ravel(found != wanted))
    first = int(at[0]) if len(at) else 0
    return (
        f"{len(at)} of {found.size} elements differ, the first at {first}:"
        f" expected {wanted.flat[first]!r}, got {found.flat[first]!r}"
    )
