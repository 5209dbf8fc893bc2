# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks and what they do together.

group           Group: allreduce, broadcast, reduce, ...; stores; closing
ranks, family   groups of groups: as ordered sets, and what each is called; part: their links
exchanges       gather, scatter, alltoall; uneven: alltoall_v
messages        send, recv, sendrecv; scatter_gather, neighbors: made of them
persistent      operations that are bound once and started again and again
calls           from a call to the core: arguments, choosing, binding, running
reductions      what op= may be
shared_arrays   arrays in memory that all ranks reach
fast, bound     the compiled call path; a proved plan for the core
"""

from commute.group.group import Group

__all__ = ["Group"]
