# SPDX-License-Identifier: Apache-2.0
"""`commute doctor` says what was chosen, why, and how fast it is."""

from __future__ import annotations

import re
import sys

import pytest


@pytest.mark.parametrize(
    ("setting", "link", "algorithm"),
    [
        ("1", "shared memory: the ranks", "line"),
        ("0", "TCP .* COMMUTE_SHARED_MEMORY=0", "recursive"),
    ],
)
def test_what_was_chosen(job, setting, link, algorithm):
    """Link, waiting, kernels and algorithms of a real pair of ranks, with figures."""
    env = {"COMMUTE_SHARED_MEMORY": setting}
    ended = job([sys.executable, "-m", "commute", "doctor"], env=env).wait()

    assert ended.code == 0, ended.out + ended.err
    assert re.search(f"link  +{link}", ended.out), ended.out
    assert re.search(r"waiting  +.*usable cores for 2 ranks", ended.out), ended.out
    assert re.search(r"kernels  +(avx512|avx2|baseline): the best", ended.out), ended.out
    assert re.search(rf"allreduce +8 B by {algorithm}.* us .* a memory copy", ended.out), ended.out
    assert "agree with NumPy" in ended.out
