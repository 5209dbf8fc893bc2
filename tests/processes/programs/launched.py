# SPDX-License-Identifier: Apache-2.0
"""What ranks started by another launcher do: join, check every value, with gloo beside if asked."""

from __future__ import annotations

import logging
import os
import sys

import numpy as np

import commute


def beside_gloo(world: commute.Group) -> None:
    """torch's own process group and ours, used alternately in one process."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    for number in range(20):
        ours, theirs = torch.full((1000,), float(number)), torch.full((1000,), float(number))
        handle = world.allreduce_async(ours)
        dist.all_reduce(theirs)
        assert torch.equal(handle.wait(), theirs)
    with commute.init(name="second") as second:  # a second world meets through the same store
        assert second.allreduce(np.ones(1))[0] == world.size
    dist.destroy_process_group()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    with commute.init(join_timeout=40) as world:
        assert world.allreduce(np.full(3, world.rank + 1.0))[0] == sum(range(world.size + 1))
        ranks = world.allgather(np.array([world.rank, world.local_rank, os.getpid()]))
        assert ranks[:, 0].tolist() == list(range(world.size))
        # All on this host; which is which is the launcher's business.
        assert sorted(ranks[:, 1].tolist()) == list(range(world.size))
        assert len(set(ranks[:, 2].tolist())) == world.size
        assert world.local_size == world.size
        if "gloo" in sys.argv[1:]:
            beside_gloo(world)
        world.barrier()
    # One write per line, so that lines of several ranks do not mix.
    os.write(1, f"rank {world.rank} of {world.size} ok\n".encode())


if __name__ == "__main__":
    main()
