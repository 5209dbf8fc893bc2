# SPDX-License-Identifier: Apache-2.0
"""A LeNet in PyTorch, trained by any number of workers through the parameter server.

    python examples/net_torch.py                                    one process
    commute run -n 4 --servers 2 examples/net_torch.py              four workers, two servers
    commute run -n 4 examples/net_torch.py --staleness 2            at most two steps ahead

Every worker draws the same batch and takes its part of it. The gradient of each parameter is pushed
by its name as soon as backward() has made it, and travels while earlier layers are computed. The
servers add the parts up and apply Adam: no optimizer here. At staleness 0 the losses are those of
one process on the whole batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import commute
from training import Progress, images, options


def lenet(side: int) -> nn.Sequential:
    """Two convolutions with pooling, three full layers; for square images of any side."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * (side // 4) ** 2, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def main() -> None:
    given = options(__doc__ or "", lr=0.002, steps=400)
    data = images(given.data)
    # In float32 the order of a sum decides a ReLU or a pool after some hundred steps, and the
    # losses of two runs part; in float64 they stay together.
    torch.set_default_dtype(torch.float64)
    x, test_x = (torch.from_numpy(pixels).double().unsqueeze(1) for pixels in data[::2])
    y, test_y = (torch.from_numpy(labels) for labels in data[1::2])
    torch.manual_seed(1)  # all workers begin with the same weights,
    rng = np.random.default_rng(2)  # and draw the same batches
    torch.set_num_threads(1)  # the other cores are for the other workers
    net = lenet(x.shape[-1])
    with commute.init() as world, world.store("net", staleness=given.staleness) as store:
        for name, weights in net.named_parameters():
            adam = commute.Adam(given.lr)
            store.dense(name, weights.shape, weights.dtype, update=adam, init=weights.detach())

            def push(weights: Tensor, name: str = name) -> None:
                store.push(name, weights.grad)

            weights.register_post_accumulate_grad_hook(push)
        totals = store.dense("totals", 3, "float64")  # a plain sum, for the progress line
        progress = Progress(store, given, shown=world.rank == 0)
        for _ in range(given.steps):
            mine = torch.from_numpy(rng.choice(len(x), given.batch)[world.rank :: world.size])
            logits = net(x[mine])
            loss = nn.functional.cross_entropy(logits, y[mine], reduction="sum")
            net.zero_grad()
            (loss / given.batch).backward()  # and push: the parts add up to the batch's gradient
            hits = (logits.argmax(dim=1) == y[mine]).sum()
            totals.push(np.array([loss.item(), hits.item(), len(mine)]))
            for name, weights in net.named_parameters():
                store.pull(name, out=weights.data)
            progress.step(totals.pull())
        store.flush()
        world.barrier()  # now everybody's last push has arrived
        for name, weights in net.named_parameters():
            store.pull(name, out=weights.data, fresh=True)
        progress.end((net(test_x).argmax(dim=1) == test_y).double().mean().item())


if __name__ == "__main__":
    main()
