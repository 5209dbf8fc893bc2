# SPDX-License-Identifier: Apache-2.0
"""The hand-written kernels for small arrays in shared memory, as the plans they stand for.

A kernel carries an array of up to 16 KB in the cache lines by which ranks tell each other what
they called, so that one look finds both. What it computes is what its twin computes, instruction
by instruction; the twin is proved, shown and compared with, and the core runs the kernel
(core/executor_outboxes.cc) wherever a plan has this name.
"""

from dataclasses import replace

from ..plan import Plan
from .one_shot import one_shot
from .shared import shared_barrier, shared_broadcast

NAME = "line"


def line_allreduce(ranks: int) -> Plan:
    return replace(one_shot(ranks), algorithm=NAME)


def line_broadcast(ranks: int, root: int) -> Plan:
    return replace(shared_broadcast(ranks, root), algorithm=NAME)


def line_barrier(ranks: int) -> Plan:
    return replace(shared_barrier(ranks), algorithm=NAME)
