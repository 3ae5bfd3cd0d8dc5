"""The transitions of one job, merged by revision from every source: its own subject, the tenant's frames, the leader's
answers and the history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from moorage.client.follow.result import Result, result_of
from moorage.schemas.frames import Answer, Change, Event
from moorage.schemas.job import TERMINAL
from moorage.schemas.names import SIMULATED_UUID

#: events that are kept until the transitions before them are known; of more the leader is asked
AHEAD_MAX: Final = 64


class Story:
    """Each transition of one job once, in the order of their revisions, and without a gap up to `rev`.

    `take` merges what is heard, `accept` what the leader answers. `is_stale` says that something was missed; `ahead`
    holds events that are heard before the transitions that precede them. The leader has to be asked in both cases.
    """

    __slots__ = ("__weakref__", "ahead", "changes", "is_stale", "job", "ledger", "rev", "simulated", "state", "why")

    def __init__(self, job: str) -> None:
        self.job = job
        self.rev = 0
        self.state = ""
        self.why = ""
        self.ledger = 0  # the record of the last transition
        self.changes: list[Change] = []
        self.ahead: list[Event] = []
        self.is_stale = False
        self.simulated = False

    @property
    def has_gap(self) -> bool:
        """Whether the leader has to be asked for what is missing."""
        return self.is_stale or bool(self.ahead)

    @property
    def last_rev(self) -> int:
        """The newest revision that was heard, also after a gap."""
        return self.ahead[-1].rev if self.ahead else self.rev

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL

    def take(self, event: Event) -> Event | None:
        """Merge an event that was heard. Return what of it is new, None if that is nothing or comes after a gap."""
        rev, changes = self.rev, event.changes
        if event.rev <= rev:
            is_kept_so = event.enforced is not None and not changes
            is_news = is_kept_so or event.waiting is not None or event.idle is not None
            if event.rev < rev or not is_news:
                return None
            self.why = event.why or self.why
            return event  # no transition: why it waits, how it is kept to its part, or that it is idle
        if len(changes) != event.rev - rev or changes[0].rev != rev + 1:
            changes = behind(rev, changes)
            if len(changes) != event.rev - rev:
                self._keep_ahead(event)
                return None
            event = msgspec.structs.replace(event, changes=changes)
        return self._append(event)

    def accept(self, event: Event) -> list[Event]:
        """Merge an answer of the leader. Return what is new; what the leader does not know is gone for good.

        After a ledger was restored the answer may have fewer transitions than the story: it is right all the same.
        """
        rev, news = self.rev, list[Event]()
        if event.rev > rev or event.state != self.state:
            news.append(self._append(msgspec.structs.replace(event, changes=behind(rev, event.changes))))
        self.rev, self.ledger = event.rev, event.ledger
        ahead, self.ahead = self.ahead, []
        news += [fresh for each in ahead if (fresh := self.take(each)) is not None]
        if event.rev <= rev:  # the leader knows of nothing before them: asking again would not end
            self.ahead.clear()
        return news

    def knows_more_than(self, answer: Answer) -> bool:
        """Return whether an answer is older than the story, as that of a replaced leader which does not know it yet.

        Records of a restored ledger have higher numbers than all before, so its answers are newer.
        """
        return answer.data.get("rev", self.rev) < self.rev and answer.ledger < self.ledger

    def all_changes(self) -> list[Change]:
        """Return the transitions that were heard, those after a gap as well."""
        if not self.ahead:
            return self.changes
        return self.changes + [change for event in self.ahead for change in event.changes]

    def so_far(self, tenant: str) -> Event:
        """Return all of it as one event."""
        return Event(tenant, self.job, self.rev, self.state, self.ledger, list(self.changes), self.why, self.simulated)

    def result(self, shown: Mapping[str, Any]) -> Result:
        """Return how the job ended; `shown` is the answer of `show`, if there was one."""
        return result_of(self.job, self.state, self.changes, self.why, shown)

    def _append(self, event: Event) -> Event:
        self.rev, self.state, self.ledger = event.rev, event.state, event.ledger
        self.why = event.why or self.why
        self.simulated = self.simulated or event.simulated
        self.changes += event.changes
        return event

    def _keep_ahead(self, event: Event) -> None:
        if len(self.ahead) >= AHEAD_MAX:
            self.is_stale = True
        elif not self.ahead or event.rev > self.ahead[-1].rev:
            self.ahead.append(event)


def shown_event(tenant: str, job: str, answer: Answer, rev: int, changes: list[Change]) -> Event:
    """Return the answer of `show` as an event, with these transitions."""
    data = answer.data
    simulated = bool(data.get("simulated")) or any(
        gpu.startswith(SIMULATED_UUID) for change in changes for gpu in change.gpus
    )
    return Event(tenant, job, rev, data["state"], answer.ledger, changes, data.get("why", ""), simulated)


def changes_of(data: Mapping[str, Any]) -> list[Change]:
    """Return the transitions in an answer of `show` or `history`."""
    return msgspec.convert(data.get("changes", []), list[Change])


def behind(rev: int, changes: list[Change]) -> list[Change]:
    """Return the transitions after revision `rev`."""
    return [change for change in changes if change.rev > rev]
