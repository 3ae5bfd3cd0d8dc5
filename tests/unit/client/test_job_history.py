"""One merge by revision: whatever is lost, doubled, late or answered by an old leader, each transition comes once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from moorage.client.answers import JobInfo
from moorage.client.follow.job_history import AHEAD_MAX, JobHistory, Shown, shown_event
from moorage.client.reading import as_struct
from moorage.schemas.capabilities import Enforced
from moorage.schemas.frames import Event, Idle, Replicas, Stalled
from tests.unit.client.scripted_scheduler import change, shown


def heard(*revs: int, state: str = "RUNNING", **fields: Any) -> Event:
    return Event("t", "j", revs[-1], state, 10 * revs[-1], [change(rev) for rev in revs], **fields)


def answered(rev: int, state: str = "RUNNING", first: int = 1) -> Shown:
    data = shown("j", state, *(change(each) for each in range(first, rev + 1)), rev=rev)
    return Shown(as_struct(JobInfo, data), 10 * rev)


def accept(history: JobHistory, answer: Shown) -> list[Event]:
    return history.accept(shown_event("t", "j", answer, answer.info.rev, answer.info.changes))


def revs_of(events: list[Event]) -> list[int]:
    return [each.rev for event in events for each in event.changes]


@pytest.mark.parametrize("seed", range(200))
def test_each_transition_comes_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    history, news, told, last = JobHistory("j"), list[Event](), list[Event](), 0
    while last < 60:
        begin, last = last + 1, last + chance.randint(1, 4)
        told.append(heard(*range(begin, last + 1)))
        for event in [told[-1]] * chance.choice([0, 1, 1, 1, 2]) + chance.sample(told, chance.choice([0, 0, 1])):
            if (fresh := history.take(event)) is not None:
                news.append(fresh)
        asked = chance.choice([last, last, max(last - 5, 1)])  # what comes meanwhile may be newer than the answer
        if history.has_gap and chance.random() < 0.4 and not history.knows_more_than(answered(asked)):
            news += accept(history, answered(asked))
    news += accept(history, answered(last))
    assert revs_of(news) == [each.rev for each in history.changes] == list(range(1, last + 1))
    assert not history.has_gap
    assert revs_of([history.so_far("t")]) == revs_of(news)


def test_events_after_a_gap_come_with_the_answer_that_fills_it() -> None:
    history = JobHistory("j")
    assert history.take(heard(1)) is not None
    assert history.take(heard(4)) is None
    assert history.has_gap
    assert (history.rev, history.last_rev) == (1, 4)
    assert revs_of(accept(history, answered(3))) == [2, 3, 4]
    assert not history.has_gap


def test_no_more_than_so_many_events_are_kept_after_a_gap() -> None:
    history = JobHistory("j")
    for rev in range(3, 2 * AHEAD_MAX + 7, 2):
        assert history.take(heard(rev)) is None
    assert len(history.ahead) == AHEAD_MAX
    assert history.is_stale


def test_an_answer_of_a_leader_that_was_replaced_is_known_by_its_record() -> None:
    history = JobHistory("j")
    accept(history, answered(5))
    older, restored = answered(2), answered(2, "QUEUED")._replace(ledger=1 << 32)
    assert history.knows_more_than(older)
    assert not history.knows_more_than(restored)
    history.take(heard(9))
    assert [event.state for event in accept(history, restored)] == ["QUEUED"]
    assert not history.has_gap, "what was heard before the restore has no meaning any more"
    assert revs_of([event for event in [history.take(heard(3))] if event is not None]) == [3]


def test_how_a_job_is_kept_is_news_without_a_transition_and_an_event_heard_twice_is_none() -> None:
    history = JobHistory("j")
    placed = heard(1, 2, state="PLACED", enforced=Enforced("guarded", "advisory"))
    assert history.take(placed) is placed
    assert history.take(placed) is None
    assert history.take(heard(2, state="PLACED", enforced=Enforced("guarded", "advisory"))) is None
    now = replace(heard(2, state="PLACED", enforced=Enforced("advisory", "advisory")), changes=[])
    assert history.take(now) is now


@pytest.mark.parametrize("told", [{"idle": Idle(1800)}, {"stalled": Stalled(600)}])
def test_that_a_job_is_idle_or_stalls_is_news_without_a_transition_each_time(told: dict[str, Any]) -> None:
    history = JobHistory("j")
    history.take(heard(1))
    idle = replace(heard(1, **told), changes=[])
    assert history.take(idle) is idle
    assert history.take(idle) is idle
    assert [each.rev for each in history.changes] == [1]


def test_only_the_reason_why_a_job_waits_is_news_without_a_transition() -> None:
    history = JobHistory("j")
    history.take(heard(1, state="QUEUED"))
    why = heard(1, state="QUEUED", waiting={"reason": "no-fit"})
    assert history.take(heard(1, state="QUEUED")) is None
    assert history.take(why) is why
    assert [each.rev for each in history.changes] == [1]


@pytest.mark.parametrize("seed", range(100))
def test_of_very_many_replicas_each_failure_comes_once_and_in_order(seed: int) -> None:
    """One that was lost, or heard before the first answer, was never missed: the next event seemed to count it."""
    chance = random.Random(seed)
    history, news, told, last, failed = JobHistory("j"), list[Event](), list[Event](), 0, set[int]()
    while last < 200:
        begin, last = last, last + chance.randint(1, 9)
        failures = [rev for rev in range(begin + 1, last + 1) if chance.random() < 0.2]
        failed.update(failures)
        many = Replicas(2_000, {"RUNNING": 2_000}, begin)
        told.append(Event("t", "j", last, "RUNNING", 10 * last, [change(rev) for rev in failures], replicas=many))
        for event in [told[-1]] * chance.choice([0, 1, 1, 1, 2]) + chance.sample(told, chance.choice([0, 0, 1])):
            if (fresh := history.take(event)) is not None:
                news.append(fresh)
        asked = chance.choice([last, last, max(last - 20, 1)])
        if history.has_gap and chance.random() < 0.4 and history.rev <= asked:
            news += accept(history, answered_of_many(asked, failed))
    news += accept(history, answered_of_many(last, failed))
    assert revs_of(news) == [each.rev for each in history.changes] == sorted(failed)
    assert not history.has_gap


def answered_of_many(rev: int, failed: set[int]) -> Shown:
    changes = [change(each) for each in sorted(failed) if each <= rev]
    many = {"of": 2_000, "states": {"RUNNING": 2_000}}
    return Shown(as_struct(JobInfo, shown("j", "RUNNING", *changes, replicas=many) | {"rev": rev}), 10 * rev)


def test_an_event_of_very_many_of_a_leader_of_a_former_release_is_taken_as_it_comes() -> None:
    history = JobHistory("j")
    assert history.take(heard(7, replicas=Replicas(2_000, {"RUNNING": 2_000}))) is not None
    assert history.rev == 7
