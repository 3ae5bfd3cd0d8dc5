"""The frames, the ledger and the snapshot of every recorded release, and of this one, are read by this one."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger import snapshot
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.invariants import validate
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.schemas.codec import Decoder, decode_request
from moorage.schemas.errors import Problem, Refused
from moorage.schemas.frames import (
    Accepted,
    Answer,
    Event,
    Events,
    FactAck,
    FactFrame,
    FleetFrame,
    Hello,
    Join,
    Joined,
    Load,
    Output,
    Renew,
    Renewed,
    RollCall,
    Wanted,
)
from moorage.schemas.release import RELEASE, minor_of
from moorage.schemas.subjects import Subjects
from tests.release.frames.recorded import RELEASES, Message, lost, newer, recorded

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("release", RELEASES)]


def of_each(release: str) -> list[tuple[Message, Decoder[Any], object]]:
    """Every message that has a type, with this release's decoder and the frame that it makes; requests apart."""
    it = recorded(release)
    found = []
    for message in it.said():
        for each, decode in ((message, message.decode), (it.answer(message), message.decode_its_answer)):
            if each is not None and decode not in (None, decode_request) and not isinstance(each.raw, list):
                assert decode is not None
                found.append((each, decode, decode(each.payload)))
    return found


def test_there_is_one_of_each(release: str) -> None:
    kinds = {type(frame) for _, _, frame in of_each(release)}
    assert kinds >= {Hello, Load, FleetFrame, RollCall, Join, Joined, Renew, Renewed, FactFrame, FactAck, Wanted}
    assert kinds >= {Accepted, Problem, Event, Events, Answer, Output}
    said = recorded(release).said()
    facts = {fact[0] for message in said if message.words[-1] == "fact" for fact in message.raw["facts"]}
    assert facts >= {"claimed", "started", "exited", "freed"}
    asked = {message.words[-1] for message in said if message.words[0] in ("api", "admin")}
    assert asked >= {"submit", "cancel", "show", "ls", "explain", "fleet", "audit", "cordon"}
    assert set(recorded(release).states.values()) == {"SUCCEEDED", "FAILED", "TIMED_OUT", "CANCELLED"}


def test_every_frame_is_read_whole(release: str) -> None:
    for message, _, frame in of_each(release):
        assert not lost(message.raw, frame), message


def test_what_a_later_release_adds_to_a_frame_is_ignored(release: str) -> None:
    for message, decode, frame in of_each(release):
        later = newer(message.raw, frame)
        assert later != message.raw
        assert decode(message.with_raw(later)) == frame, message


def test_its_requests_are_read_and_what_a_later_release_adds_to_one_is_refused(release: str) -> None:
    it, good = recorded(release), 0
    for message in it.said():
        answer = it.answer(message)
        if message.decode is not decode_request or isinstance(message.raw, list):
            continue
        assert answer is not None
        if answer.raw.get("kind") == "error":
            with pytest.raises(Refused) as caught:
                decode_request(message.payload)
            assert caught.value.code == answer.raw["code"]
            continue
        good += 1
        request = decode_request(message.payload)
        assert not lost(message.raw, request), message
        with pytest.raises(Refused) as caught:
            decode_request(message.with_raw(newer(message.raw, request)))
        assert (caught.value.code, caught.value.problem.field.rpartition(".")[2]) == ("invalid-argument", "novelty")
    assert good >= 10


def fold_all(release: str, state: State) -> State:
    for seq, _, data in recorded(release).ledger:
        if seq > state.seq:
            fold(state, decode_record(data), seq)
    return state


def test_its_ledger_folds_to_the_same_state(release: str) -> None:
    it = recorded(release)
    state = fold_all(release, State())
    validate(state)
    assert state.digest == it.digest
    assert {job.name: job.state for job in state.jobs.values()} == it.states
    assert state.workers["w1"].hello["release"] == it.release


def test_its_snapshot_and_the_tail_are_the_same_state(release: str) -> None:
    it = recorded(release)
    seq, data = it.snapshot
    state = snapshot.load(data)  # which checks the digest that the release wrote
    assert state.seq == seq
    validate(state)
    assert any(not job.over for job in state.jobs.values()), "the snapshot was taken under a running job"
    assert fold_all(release, state).digest == it.digest
    again = snapshot.load(snapshot.dump(state))
    assert again.digest == it.digest


def test_a_leader_starts_from_it(release: str) -> None:
    state = snapshot.load(recorded(release).snapshot[1])
    engine = Engine(state, Config(), Subjects(), 1, 0)
    assert [host.worker.id for host in engine.fleet.hosts.values()] == ["w1"]


def test_it_is_a_release_before_this_one_or_this_one(release: str) -> None:
    found, own = minor_of(recorded(release).release), minor_of(RELEASE)
    assert found is not None
    assert own is not None
    assert found <= own
