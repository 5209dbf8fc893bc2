# SPDX-License-Identifier: Apache-2.0
"""Plans as text."""

import pytest

from commute.plan import Collective, algorithms, build, show

STAR = """\
allreduce by gather-to-root on 3 ranks
  1 chunk in 1 wave, 2 steps on the longest chain, 4 messages, 8 instructions
  1.00 x the array on 0->1, 0->2, 1->0, 2->0
  adds up in rank order: yes; plan {hash:016x}

rank 0, with 1, 2
  step  lane 0                        lane 1
     0  send OUT[0] -> 1  after 1.1   recv_reduce OUT[0] <- 1
     1  send OUT[0] -> 2  after 1.1   recv_reduce OUT[0] <- 2

rank 1, with 0
  step  lane 0             lane 1
     0  send OUT[0] -> 0   recv OUT[0] <- 0

rank 2, with 0
  step  lane 0             lane 1
     0  send OUT[0] -> 0   recv OUT[0] <- 0
"""


def test_whole_plan() -> None:
    """Header, then a block per rank with a column per lane."""
    plan = build("allreduce", "gather-to-root", 3)

    assert show(plan) == STAR.format(hash=plan.hash)


def test_one_rank() -> None:
    """Only what one rank does, under the same header."""
    text = show(build("broadcast", "binomial", 4, root=3), rank=1)

    assert "broadcast by binomial on 4 ranks, root 3" in text
    assert "\nrank 1, with 2, 3\n" in text
    assert "\nrank 0, with" not in text


@pytest.mark.parametrize("collective", list(Collective))
def test_every_plan_can_be_shown(collective: Collective) -> None:
    """All algorithms, a rank with nothing to do included."""
    for name in algorithms(collective):
        for ranks in (1, 2, 6):
            text = show(build(collective, name, ranks))

            assert text.startswith(f"{collective.label} by {name} on {ranks} rank")
            assert max(map(len, text.splitlines())) <= 130
