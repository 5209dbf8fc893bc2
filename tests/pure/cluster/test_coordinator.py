# SPDX-License-Identifier: Apache-2.0
"""The coordinator's logic, told as stories: who joins, who goes, who hears of it."""

import re
from dataclasses import replace

import msgspec
import pytest

from commute.cluster.control import Abandoned, Frame, Hello, Kind, Leave, Refused, Welcome
from commute.cluster.coordinator import (
    FIRST_BEAT_SECONDS,
    GIVEN_UP_SECONDS,
    Close,
    Closed,
    Coordinator,
    Effect,
    Failed,
    Failure,
    Joined,
    Notice,
    Received,
    Send,
    Tick,
    Watched,
)

BEAT = Frame(Kind.BEAT)


def hello(rank: int, size: int = 4, **changes: object) -> Hello:
    plain = Hello(
        name="world",
        rank=rank,
        size=size,
        host="hosta" if rank < 2 else "hostb",
        pid=100 + rank,
        addresses=((f"10.0.0.{rank}", 4000),),
        commute_version="0.1.0",
        python_version="3.12.1",
        peer_timeout=5.0,
        join_timeout=300.0,
    )
    return msgspec.structs.replace(plain, **changes)


def formed(size: int = 3, now: float = 0.0, *, first: int = 0, **changes: object) -> Coordinator:
    """A coordinator with one world, whose rank r has the connection first + r; all have beaten."""
    coordinator = Coordinator()
    for rank in range(size):
        coordinator.step(Joined(first + rank, hello(rank, size, **changes)), now)
    for rank in range(size):
        coordinator.step(Received(first + rank, BEAT), now)
    return coordinator


def frames(effects: list[Effect]) -> dict[int, Frame]:
    """The frame each connection is sent, of effects that send at most one to each."""
    sent = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Frame)]
    assert len({e.connection for e in sent}) == len(sent)
    return {e.connection: e.message for e in sent if isinstance(e.message, Frame)}


def refusal(effects: list[Effect], connection: int) -> Refused:
    (sent,) = [e for e in effects if isinstance(e, Send) and e.connection == connection]
    assert Close(connection) in effects
    assert isinstance(sent.message, Refused)
    return sent.message


def test_world_is_formed_by_its_last_rank() -> None:
    """Everybody is welcomed at once, with all members by rank."""
    coordinator = Coordinator()
    early = [coordinator.step(Joined(rank, hello(rank)), 0.0) for rank in (3, 0, 1)]
    effects = coordinator.step(Joined(2, hello(2)), 1.0)

    assert early == [[], [], []]
    assert [e.connection for e in effects if isinstance(e, Send)] == [0, 1, 2, 3]
    welcome = effects[0].message  # type: ignore[union-attr]
    assert isinstance(welcome, Welcome)
    assert welcome.epoch == 1
    assert [(m.rank, m.host, m.pid) for m in welcome.members] == [
        (0, "hosta", 100),
        (1, "hosta", 101),
        (2, "hostb", 102),
        (3, "hostb", 103),
    ]
    assert welcome.members[3].addresses == (("10.0.0.3", 4000),)
    assert all(e.message == welcome for e in effects if isinstance(e, Send))


def test_world_of_one() -> None:
    """Complete as soon as it is asked for."""
    (effect,) = Coordinator().step(Joined(7, hello(0, 1)), 0.0)

    assert isinstance(effect, Send)
    assert isinstance(effect.message, Welcome)


def test_roster_every_ten_seconds() -> None:
    """Who is missing, who is there, how long it goes on."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0)), 0.0)
    coordinator.step(Joined(1, hello(1)), 0.0)
    at = [t for t in range(31) if coordinator.step(Tick(), float(t))]
    (notice,) = coordinator.step(Tick(), 40.0)

    assert at == [10, 20, 30]
    assert notice == Notice(
        "waiting for ranks 2, 3 of world 'world' (joined: 0 and 1 on hosta); 260 s left"
    )


def test_roster_of_a_large_world_is_short() -> None:
    """Runs of ranks are written as spans; a rank that went away is named."""
    coordinator = Coordinator()
    for rank in (0, 1, 2, 3, 40, 5):
        coordinator.step(Joined(rank, hello(rank, 64)), 0.0)
    coordinator.step(Closed(3), 1.0)
    (notice,) = coordinator.step(Tick(), 10.0)

    assert notice == Notice(
        "waiting for ranks 3, 4, 6-39, 41-63 of world 'world' (joined: 0 and 1 on hosta;"
        " 2, 5 and 40 on hostb; rank 3 joined from hostb (pid 103) and went away); 290 s left"
    )


def test_deadline_refuses_all_with_the_roster() -> None:
    """The shortest patience counts; a rank that comes just too late is told the same."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0, 3)), 0.0)
    coordinator.step(Joined(1, hello(1, 3, join_timeout=20.0)), 10.0)
    before = coordinator.step(Tick(), 29.9)
    effects = coordinator.step(Tick(), 30.0)
    late = coordinator.step(Joined(2, hello(2, 3)), 31.0)

    roster = "waiting for rank 2 of world 'world' (joined: 0 and 1 on hosta)"
    assert not any(isinstance(e, Send) for e in before)
    for connection in (0, 1):
        assert refusal(effects, connection) == Refused(
            f"world 'world' was not complete after 30 s: {roster};"
            " start the missing ranks, or raise join_timeout",
            roster,
        )
    assert refusal(late, 2) == refusal(effects, 0)
    assert not coordinator.populated


def test_a_second_attempt_after_the_deadline() -> None:
    """Whoever knows of the refusal may try again; the epoch counts formed worlds only."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0, 2, join_timeout=1.0)), 0.0)
    coordinator.step(Tick(), 1.0)
    coordinator.step(Joined(1, hello(0, 2)), 2.0)
    effects = coordinator.step(Joined(2, hello(1, 2)), 3.0)

    assert [e.message.epoch for e in effects if isinstance(e, Send)] == [1, 1]  # type: ignore


def test_refusals_are_forgotten() -> None:
    """A rank that comes much later begins a new attempt."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0, 2, join_timeout=1.0)), 0.0)
    coordinator.step(Tick(), 1.0)

    assert coordinator.step(Joined(1, hello(1, 2)), 1.0 + GIVEN_UP_SECONDS) == []
    assert coordinator.populated


def test_rank_out_of_range_is_refused() -> None:
    """It harms nobody else."""
    effects = Coordinator().step(Joined(0, hello(4, 4)), 0.0)

    assert refusal(effects, 0).reason == "rank 4 is not below size 4; ranks count from 0"


def test_second_process_of_a_rank_is_refused() -> None:
    """The first one stays."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0)), 0.0)
    effects = coordinator.step(Joined(1, hello(0, pid=55)), 1.0)

    assert refusal(effects, 1).reason == (
        "rank 0 of world 'world' joined already, from hosta (pid 100), and again from"
        " hosta (pid 55); give every process a rank of its own"
    )
    assert coordinator.step(Closed(1), 2.0) == []
    assert coordinator.populated


def test_a_rank_may_come_back_while_the_world_forms() -> None:
    """Its first process is gone; no loss, since there is no world yet."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0, 2)), 0.0)

    assert coordinator.step(Closed(0), 1.0) == []
    assert not coordinator.populated
    assert coordinator.step(Joined(1, hello(0, 2)), 2.0) == []
    assert len(coordinator.step(Joined(2, hello(1, 2)), 3.0)) == 2


def test_different_sizes_are_refused_at_once() -> None:
    """Everybody is told, rather than waiting for ranks that cannot come."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0, 4)), 0.0)
    effects = coordinator.step(Joined(1, hello(2, 8)), 1.0)

    assert refusal(effects, 0) == refusal(effects, 1)
    assert refusal(effects, 0).reason == (
        "the ranks of world 'world' disagree on its size: rank 0 on hosta says 4, rank 2 on hostb"
        " says 8; start all of them with the same size"
    )


def test_different_versions_are_refused_with_a_table() -> None:
    """Also those who come later."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0)), 0.0)
    coordinator.step(Joined(1, hello(1)), 0.0)
    newer = hello(2, commute_version="0.2.0", python_version="3.14.0")
    effects = coordinator.step(Joined(2, newer), 1.0)
    late = coordinator.step(Joined(3, hello(3)), 2.0)

    assert refusal(effects, 0).reason == (
        "the members of world 'world' run different versions of commute; install the same one"
        " everywhere:\n"
        "  commute 0.1.0, Python 3.12.1: ranks 0 and 1 on hosta\n"
        "  commute 0.2.0, Python 3.14.0: rank 2 on hostb"
    )
    assert refusal(late, 3) == refusal(effects, 0)


def test_different_pythons_are_fine() -> None:
    """Nothing that travels depends on Python's version."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0, 2)), 0.0)
    effects = coordinator.step(Joined(1, hello(1, 2, python_version="3.14.0")), 1.0)

    assert isinstance(effects[0].message, Welcome)  # type: ignore[union-attr]


def test_loopback_in_a_world_of_several_hosts_is_refused() -> None:
    """Before anybody waits for a link that cannot come about."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0, addresses=(("127.0.0.1", 4000),))), 0.0)
    effects = coordinator.step(Joined(2, hello(2)), 1.0)

    assert refusal(effects, 0).reason == (
        "rank 0 on hosta can be reached from its own host only (127.0.0.1), but rank 2 is on"
        " hostb; give it the coordinator by an address of the network, or pass advertise="
    )


def test_generations_of_a_name() -> None:
    """Joining again after the world was formed makes the next one, beside the first."""
    coordinator = formed(2)
    coordinator.step(Joined(10, hello(0, 2)), 1.0)
    effects = coordinator.step(Joined(11, hello(1, 2)), 1.0)
    lost = frames(coordinator.step(Closed(10), 2.0))

    assert [e.message.epoch for e in effects if isinstance(e, Send)] == [2, 2]  # type: ignore
    assert list(lost) == [11]
    assert coordinator.failures.keys() == {("world", 2)}


def test_worlds_of_other_names_are_apart() -> None:
    """A loss in one is none in the other, though the ranks are the same."""
    coordinator = formed(2)
    coordinator.step(Joined(10, hello(0, 2, name="servers")), 1.0)
    coordinator.step(Joined(11, hello(1, 2, name="servers")), 1.0)

    assert list(frames(coordinator.step(Closed(0), 2.0))) == [1]


def test_beats_are_answered() -> None:
    """So a member knows that the coordinator lives."""
    coordinator = formed()

    assert coordinator.step(Received(1, BEAT), 1.0) == [Send(1, BEAT)]


def test_closed_connection_is_a_loss_at_once() -> None:
    """All others hear of it, and the first failure is kept."""
    coordinator = formed()
    effects = coordinator.step(Closed(1), 1.0)
    again = coordinator.step(Closed(1), 1.0)

    text = "its connection to the coordinator closed before it left"
    lost = Frame(Kind.LOST, rank=1, by=-1, text=text)
    assert frames(effects) == {0: lost, 2: lost}
    assert effects[-1] == Failed("world", 1, Failure(1, text, -1))
    assert again == []


def test_reset_connection_names_the_cause() -> None:
    """What the system said is worth reading."""
    effects = formed().step(Closed(1, "Connection reset by peer"), 1.0)

    assert frames(effects)[0].text.endswith("closed before it left: Connection reset by peer")


def test_leaving_is_relayed_and_no_loss() -> None:
    """The connection may then close."""
    coordinator = formed()
    leave = Frame(Kind.LEAVE, Leave.FINISHED, rank=1, by=1)
    effects = coordinator.step(Received(1, leave), 1.0)

    assert frames(effects) == {0: leave, 2: leave}
    assert coordinator.step(Received(1, leave), 1.1) == []
    assert coordinator.step(Closed(1), 1.2) == []
    assert coordinator.failures == {}


def test_leaving_as_failed_is_the_first_failure() -> None:
    """Later failures do not replace it."""
    coordinator = formed()
    leave = Frame(Kind.LEAVE, Leave.FAILED, rank=1, by=1, text="ValueError: x")
    effects = coordinator.step(Received(1, leave), 1.0)
    later = coordinator.step(Closed(0), 2.0)

    assert Failed("world", 1, Failure(1, "ValueError: x", 1)) in effects
    assert not any(isinstance(e, Failed) for e in later)
    assert coordinator.failures == {("world", 1): Failure(1, "ValueError: x", 1)}


def test_world_ends_with_its_last_member() -> None:
    """Left or lost, all the same; then nobody is there any more."""
    coordinator = formed(2)
    coordinator.step(Received(0, Frame(Kind.LEAVE, rank=0, by=0)), 1.0)
    populated = coordinator.populated
    coordinator.step(Closed(1), 2.0)

    assert populated
    assert not coordinator.populated
    assert coordinator.ever_joined


def test_silence_is_a_loss_after_peer_timeout() -> None:
    """The silent one is told too: it may only have been stopped for a while."""
    coordinator = formed()
    for tenth in range(1, 51):
        now = tenth / 10
        coordinator.step(Received(0, BEAT), now)
        coordinator.step(Received(2, BEAT), now)
        assert coordinator.step(Tick(), now) == []
    effects = coordinator.step(Tick(), 5.1)

    sent = frames(effects)
    assert sent.keys() == {0, 1, 2}
    assert sent[0] == Frame(Kind.LOST, rank=1, text="it was silent for 5.1 s (peer_timeout 5 s)")
    assert coordinator.step(Tick(), 5.2) == []


def test_first_beat_may_take_longer() -> None:
    """A short peer_timeout does not count before a member's health thread has started."""
    coordinator = Coordinator()
    for rank in range(2):
        coordinator.step(Joined(rank, hello(rank, 2, peer_timeout=1.0)), 0.0)
    quiet = [coordinator.step(Tick(), t / 10) for t in range(1, int(10 * FIRST_BEAT_SECONDS) + 1)]
    effects = coordinator.step(Tick(), FIRST_BEAT_SECONDS + 0.1)

    assert not any(quiet)
    assert len([e for e in effects if isinstance(e, Failed)]) == 1


def test_a_stalled_coordinator_does_not_judge() -> None:
    """After a gap of its own everybody gets a fresh start; then silence counts again."""
    coordinator = formed(2)
    coordinator.step(Tick(), 0.1)
    after_stall = coordinator.step(Tick(), 60.0)
    quiet = [coordinator.step(Tick(), 60.0 + t) for t in (1.0, 2.0, 3.0, 4.0, 5.0)]
    lost = coordinator.step(Tick(), 65.1)

    assert after_stall == []
    assert not any(quiet)
    assert any(isinstance(e, Failed) for e in lost)


def test_a_report_of_loss_is_relayed_once() -> None:
    """All others hear it, the one it is about too; a second report adds nothing."""
    coordinator = formed(4)
    report = Frame(Kind.LOST, rank=3, by=0, text="its link broke")
    effects = coordinator.step(Received(0, report), 1.0)
    second = coordinator.step(Received(1, Frame(Kind.LOST, rank=3, by=1, text="same")), 1.1)

    assert frames(effects) == {1: report, 2: report, 3: report}
    assert second == []
    assert coordinator.step(Closed(3), 1.2) == []


def test_who_left_is_not_reported_lost() -> None:
    """A member that closes says LEAVE first; its links may be seen to break before that."""
    coordinator = formed()
    coordinator.step(Received(2, Frame(Kind.LEAVE, rank=2, by=2)), 1.0)

    assert coordinator.step(Received(0, Frame(Kind.LOST, rank=2, by=0)), 1.1) == []
    assert coordinator.failures == {}


def test_own_words_replace_a_report() -> None:
    """Peers saw the link break; why it broke, the member says itself."""
    coordinator = formed()
    coordinator.step(Watched(9), 0.0)
    coordinator.step(Received(0, Frame(Kind.LOST, rank=2, by=0, text="link broke")), 1.0)
    own = Frame(Kind.LEAVE, Leave.FAILED, rank=2, by=2, text="ValueError: x")
    effects = coordinator.step(Received(2, own), 1.1)

    assert frames(effects) == {9: own}
    assert coordinator.failures == {("world", 1): Failure(2, "ValueError: x", 2)}


def test_abandon_is_relayed_once_per_operation() -> None:
    """To all others, unchanged."""
    coordinator = formed()
    abandon = Frame(Kind.ABANDON, Abandoned.TIMEOUT, rank=2, by=1, op=41, text="timed out")
    effects = coordinator.step(Received(1, abandon), 1.0)

    assert frames(effects) == {0: abandon, 2: abandon}
    assert coordinator.step(Received(1, abandon), 1.1) == []
    assert len(coordinator.step(Received(1, with_op(abandon, op=42)), 1.2)) == 2
    assert len(coordinator.step(Received(1, replace(abandon, group=7)), 1.3)) == 2
    assert coordinator.step(Received(1, replace(abandon, group=7)), 1.4) == []


def test_leaving_a_group_is_relayed_and_changes_nothing() -> None:
    """The member is still in the world, and neither left nor failed."""
    coordinator = formed()
    leave = Frame(Kind.LEAVE, Leave.FAILED, rank=1, by=1, text="ValueError: x", group=7)
    effects = coordinator.step(Received(1, leave), 1.0)

    assert frames(effects) == {0: leave, 2: leave}
    assert coordinator.failures == {}
    goodbye = Frame(Kind.LEAVE, Leave.FINISHED, rank=1, by=1)
    assert frames(coordinator.step(Received(1, goodbye), 1.1)) == {0: goodbye, 2: goodbye}


def with_op(frame: Frame, *, op: int) -> Frame:
    return Frame(frame.kind, frame.code, frame.rank, frame.by, op, frame.text)


@pytest.mark.parametrize(
    ("frame", "rule"),
    [
        (Frame(Kind.LEAVE, rank=2, by=2), "it sent a LEAVE of rank 2"),
        (Frame(Kind.LOST, rank=2, by=0), "it spoke as rank 0"),
        (Frame(Kind.LOST, rank=7, by=1), "it reported the loss of rank 7"),
        (Frame(Kind.LOST, rank=1, by=1), "it reported the loss of rank 1"),
        (Frame(Kind.ABANDON, 1, rank=2, by=-1), "it spoke as rank -1"),
    ],
)
def test_nobody_speaks_for_another(frame: Frame, rule: str) -> None:
    """Whoever does is out."""
    coordinator = formed()
    effects = coordinator.step(Received(1, frame), 1.0)

    assert Close(1) in effects
    assert frames(effects).keys() == {0, 2}
    assert re.search(f"it broke the protocol: {rule}", frames(effects)[0].text)


def test_frames_before_the_welcome_break_the_protocol() -> None:
    """The connection is closed; the world goes on forming."""
    coordinator = Coordinator()
    coordinator.step(Joined(0, hello(0, 2)), 0.0)

    assert coordinator.step(Received(0, BEAT), 1.0) == [Close(0)]
    assert not coordinator.populated


def test_unknown_connections_are_ignored() -> None:
    """Events may still be under way when a connection was closed."""
    coordinator = formed()

    assert coordinator.step(Received(77, BEAT), 1.0) == []
    assert coordinator.step(Closed(77), 1.0) == []


def test_launchers_hear_of_failures() -> None:
    """LOST and LEAVE as failed, not LEAVE as finished; also what happened before they came."""
    coordinator = formed()
    coordinator.step(Watched(9), 0.0)
    finished = coordinator.step(Received(0, Frame(Kind.LEAVE, rank=0, by=0)), 1.0)
    failed = Frame(Kind.LEAVE, Leave.FAILED, rank=1, by=1, text="x")
    effects = coordinator.step(Received(1, failed), 2.0)
    late = coordinator.step(Watched(10), 3.0)

    assert 9 not in frames(finished)
    assert frames(effects)[9] == failed
    assert late == [Send(10, failed)]
    assert coordinator.launchers == {9, 10}


def test_launchers_report_to_each_other() -> None:
    """A process that failed before it joined is known to its launcher only."""
    coordinator = formed()
    coordinator.step(Watched(8), 0.0)
    coordinator.step(Watched(9), 0.0)
    report = Frame(Kind.LEAVE, Leave.FAILED, rank=5, by=-1, op=3, text="exited with 3")

    assert frames(coordinator.step(Received(8, report), 1.0)) == {9: report}
    assert coordinator.step(Received(8, BEAT), 1.0) == [Send(8, BEAT)]
    assert coordinator.step(Received(8, Frame(Kind.ABANDON)), 1.0) == []
    coordinator.step(Closed(8), 2.0)
    assert coordinator.launchers == {9}
