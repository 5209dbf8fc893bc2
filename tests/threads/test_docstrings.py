# SPDX-License-Identifier: Apache-2.0
"""The samples in the docstrings run and give what they show."""

import doctest
import importlib

import pytest

MODULES = (
    *("commute.group.exchanges", "commute.group.group", "commute._handle", "commute._init"),
    *(
        "commute.group.messages",
        "commute.group.neighbors",
        "commute.group.persistent",
        "commute.group.uneven",
        "commute.testing",
    ),
    *("commute.store.initial", "commute.store.updates"),
)


@pytest.mark.parametrize("name", MODULES)
def test_samples_run(name: str) -> None:
    """Every sample of the module runs; there is at least one."""
    found = doctest.testmod(importlib.import_module(name))

    assert found.attempted > 0
    assert found.failed == 0
