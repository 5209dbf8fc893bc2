# SPDX-License-Identifier: Apache-2.0
"""How much room for arrays of `world.empty` there is."""

import resource

import pytest

from commute.group.shared_arrays import GROUP_BYTES, room_bytes

PAGE = resource.getpagesize()


def test_all_memory_but_not_all_addresses() -> None:
    """However many ranks map each other's rooms, a process can have them all, and groups beside."""
    one = room_bytes(1)

    assert one > 0 and one % PAGE == 0
    for ranks in (2, 7, 64, 1000):
        room = room_bytes(ranks)
        assert room <= one and room % PAGE == 0
        assert ranks * room <= 1 << 44
        assert ranks * room_bytes(ranks, GROUP_BYTES) <= GROUP_BYTES


@pytest.mark.parametrize("limited", [resource.RLIMIT_AS, resource.RLIMIT_FSIZE])
def test_none_where_a_process_is_limited(monkeypatch: pytest.MonkeyPatch, limited: int) -> None:
    """A mapping or a file of that size would be refused, and with it all shared memory."""
    limits = {limited: (1 << 30, 1 << 30)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, unlimited))

    assert room_bytes(2) == 0
