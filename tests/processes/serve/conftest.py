# SPDX-License-Identifier: Apache-2.0
"""Servers that stay up, and clients of theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import Server


@pytest.fixture
def serve(job: Callable[..., Any], tmp_path: Path) -> Callable[..., Server]:
    """`serve("--shards", "2")` starts a server."""
    return lambda *flags, **options: Server(job, tmp_path, *flags, **options)


@pytest.fixture(params=["1", "0"], ids=["shared", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Clients that share memory with their server, and clients that use TCP."""
    monkeypatch.setenv("COMMUTE_SHARED_MEMORY", request.param)
    return request.param
