# SPDX-License-Identifier: Apache-2.0
"""How many cores there are: quotas of control groups of both versions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from commute._cores import quota, usable_cores


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, math.inf),
        ("0::/gone/in/here\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {}, math.inf),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            "3:cpu:/x/y\n",
            {
                "cpu/x/y/cpu.cfs_quota_us": "-1\n",
                "cpu/x/y/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_quota_us": "300000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        ("0::/a\n", {"a/cpu.max": "nonsense"}, math.inf),
    ],
)
def test_quota(tmp_path: Path, own: str, files: dict[str, str], cores: float) -> None:
    """The smallest limit of the group and of those above it, whatever the version."""
    written(tmp_path, {**files, "own": own})

    assert quota(tmp_path, tmp_path / "own") == cores


def test_without_control_groups(tmp_path: Path) -> None:
    """Nothing there, nothing limited; and on this machine there is at least some of a core."""
    assert quota(tmp_path, tmp_path / "none") == math.inf
    assert usable_cores() > 0
