# SPDX-License-Identifier: Apache-2.0
"""alltoall and scatter whose blocks are read where they are, in the memory of other processes.

Through the outboxes every byte that changes its rank is copied twice. Where the kernel lets the
processes of a host read each other's memory, it is copied once: everyone says where its array is,
fetches its block from each who has one for it, and waits until all have fetched theirs. The core
runs that by hand (core/executor_fetch.cc) wherever a plan has this name; its twin, which says the
same through the outboxes, is proved, shown and compared with.
"""

from dataclasses import replace

from ..plan import Plan
from .shared import shared_alltoall, shared_scatter

NAME = "fetch"


def fetched_alltoall(ranks: int) -> Plan:
    return replace(shared_alltoall(ranks), algorithm=NAME)


def fetched_scatter(ranks: int, root: int) -> Plan:
    return replace(shared_scatter(ranks, root), algorithm=NAME)
