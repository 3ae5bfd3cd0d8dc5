"""A scheduler of a few lines, over plain nats-py, that says exactly what a test tells it to."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.schemas.codec import encode
from moorage.schemas.frames import Answer, Change, Event, Events
from moorage.schemas.subjects import Subjects
from moorage.testing.conformance import plain_nats


def change(rev: int, state: str = "RUNNING", **fields: Any) -> Change:
    return Change(rev, 1000 + rev, 0, 1, state, **fields)


class ScriptedScheduler:
    """Answers each verb of one tenant with what waits in `answers[verb]`; the last one again and again."""

    def __init__(self, url: str, tenant: str) -> None:
        self.subjects = Subjects()
        self.tenant = tenant
        self.answers: dict[str, deque[Any]] = {}
        self.asked: list[tuple[str, Any]] = []
        self._url = url
        self._nc: Client | None = None

    async def __aenter__(self) -> ScriptedScheduler:
        self._nc = await plain_nats.connect(self._url)
        await self._nc.subscribe(self.subjects.api(self.tenant, "*"), cb=self._on_request)
        for _ in range(2):  # nats-py sends the first PING ahead of the subscription
            await self._nc.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._nc is not None
        await self._nc.close()

    def will(self, verb: str, *answers: Any) -> None:
        """What the next requests get; None is no answer at all."""
        self.answers[verb] = deque(answers)

    def will_show(self, *shown: dict[str, Any] | Any) -> None:
        self.will("show", *(Answer("show", 9, data) if isinstance(data, dict) else data for data in shown))

    async def say(self, job: str, state: str, *changes: Change, rev: int | None = None) -> None:
        """An event on the job's own subject."""
        await self._publish(self.subjects.event(self.tenant, job), self.event(job, state, *changes, rev=rev))

    async def say_to_tenant(self, *events: Event) -> None:
        await self._publish(self.subjects.events(self.tenant), Events(self.tenant, 9, list(events)))

    def event(self, job: str, state: str, *changes: Change, rev: int | None = None) -> Event:
        return Event(self.tenant, job, rev or changes[-1].rev, state, 9, list(changes))

    async def say_raw(self, subject: str, payload: bytes) -> None:
        assert self._nc is not None
        await self._nc.publish(subject, payload)

    async def _publish(self, subject: str, frame: object) -> None:
        await self.say_raw(subject, encode(frame))

    async def _on_request(self, msg: Msg) -> None:
        verb = self.subjects.token(msg.subject, 2)
        self.asked.append((verb, msgspec.json.decode(msg.data)))
        waiting = self.answers[verb]
        answer = waiting.popleft() if len(waiting) > 1 else waiting[0]
        if answer is not None:
            assert self._nc is not None
            await self._nc.publish(msg.reply, encode(answer))


def shown(job: str, state: str, *changes: Change, **fields: Any) -> dict[str, Any]:
    """What `show` answers."""
    return {
        "job": job,
        "tenant": "t",
        "state": state,
        "rev": changes[-1].rev if changes else 0,
        "changes": msgspec.to_builtins(list(changes)),
        "request": {"run": {"argv": ["x"], "driver": "noop"}},
        **fields,
    }
