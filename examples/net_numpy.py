# SPDX-License-Identifier: Apache-2.0
"""A net of two layers in NumPy, trained by any number of workers through the parameter server.

    python examples/net_numpy.py                                    one process
    commute run -n 4 --servers 2 examples/net_numpy.py              four workers, two servers
    commute run -n 4 examples/net_numpy.py --staleness none         nobody waits for anybody

Every worker draws the same batch and takes its part of it. It pushes the gradient of each layer by
name and pulls the weights back; the servers add the parts up and apply SGD. At staleness 0 the
losses are those of one process on the whole batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import commute
from training import Progress, images, options

HIDDEN, CLASSES = 64, 10
Arrays = dict[str, NDArray[np.float64]]


def first_weights(inputs: int) -> Arrays:
    rng = np.random.default_rng(1)  # the same on every worker
    return {
        "w1": rng.normal(size=(inputs, HIDDEN)) * np.sqrt(2 / inputs),
        "b1": np.zeros(HIDDEN),
        "w2": rng.normal(size=(HIDDEN, CLASSES)) * np.sqrt(2 / HIDDEN),
        "b2": np.zeros(CLASSES),
    }


def forward(w: Arrays, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The hidden layer, and the logarithms of the probabilities."""
    hidden = np.maximum(x @ w["w1"] + w["b1"], 0)
    logits = hidden @ w["w2"] + w["b2"]
    logits -= logits.max(axis=1, keepdims=True)
    return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def part(w: Arrays, x: NDArray[np.float64], y: NDArray[np.int64], batch: int) -> Arrays:
    """This worker's share of the batch's gradient, and of what there is to tell."""
    hidden, logs = forward(w, x)
    hits, loss = (logs.argmax(axis=1) == y).sum(), -logs[np.arange(len(y)), y].sum()
    error = (np.exp(logs) - np.eye(CLASSES)[y]) / batch
    back = (error @ w["w2"].T) * (hidden > 0)
    gradient = {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}
    return gradient | {"totals": np.array([loss, hits, len(y)])}


def main() -> None:
    given = options(__doc__ or "", lr=0.5, steps=1500)
    data = images(given.data)
    x, test_x = (pixels.reshape(len(pixels), -1).astype(float) for pixels in data[::2])
    rng = np.random.default_rng(2)  # all workers draw the same batches
    with commute.init() as world, world.store("net", staleness=given.staleness) as store:
        w = first_weights(x.shape[1])
        for name, value in w.items():
            store.dense(name, value.shape, value.dtype, update=commute.SGD(given.lr), init=value)
        store.dense("totals", 3, "float64")  # a plain sum, for the progress line
        w["totals"] = np.zeros(3)
        progress = Progress(store, given, shown=world.rank == 0)
        for _ in range(given.steps):
            mine = rng.choice(len(x), given.batch)[world.rank :: world.size]
            for name, gradient in part(w, x[mine], data.y[mine], given.batch).items():
                store.push(name, gradient)
            for name, value in w.items():
                store.pull(name, out=value)
            progress.step(w["totals"])
        store.flush()
        world.barrier()  # now everybody's last push has arrived
        w = {name: store.pull(name, fresh=True) for name in w}
        progress.end((forward(w, test_x)[1].argmax(axis=1) == data.test_y).mean())


if __name__ == "__main__":
    main()
