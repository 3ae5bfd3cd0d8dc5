"""A recorded worker and its callers, played again to the scheduler of today.

Each message is sent when its turn comes, and awaited where it is a question. What only the scheduler can know is put in
its place: the session that it gives, and the fence of each member that it places. A fact about a member waits until the
member was placed here too; what was placed sooner here than then (a retry's pause is over, on a slow machine, before
another job's end is told) has its turn first, since it may hold the GPU that is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.schemas.subjects import Subjects
from tests.asking import answered
from tests.release.frames.recorded import PREFIX, Message, Recorded, narrower
from tests.waiting import until

WAIT_S: Final = 60.0
#: tenant, job, replica, attempt
Name = tuple[str, str, int, int]
Change = Callable[[Message, Any], Any]


class Replay:
    """`change` may rewrite what the worker says, as a later release would say it."""

    def __init__(self, nc: Client, subjects: Subjects, it: Recorded, change: Change | None = None) -> None:
        self.nc = nc
        self.subjects = subjects
        self.it = it
        self.change = change
        self.sessions: dict[str, str] = {}
        self.fences: dict[Name, int] = {}
        self.placed: dict[Name, list[Any]] = {}
        self.started: set[Name] = set()
        self.wrong: list[str] = []
        #: the question's subject, what was answered then, what is answered now
        self.answers: list[tuple[str, Any, Any]] = []
        self._kept = {_page(m.raw): it.answer(m) for m in it.said() if m.words[0] == "worker" and m.words[-1] == "logs"}
        self._played: set[int] = set()
        self._facts = 0  # frames of facts sent in this session
        self._then = {_name(place): place for m in it.said() if m.words[-1] == "wanted" for place in _places(m.raw)}

    async def run(self) -> None:
        await self.nc.subscribe(f"{self.subjects.prefix}.worker.*.wanted", cb=self._on_wanted)
        await self.nc.subscribe(f"{self.subjects.prefix}.worker.*.logs", cb=self._on_read)
        said = list(self.it.said())
        for at, message in enumerate(said):
            room, verb = message.words[0], message.words[-1]
            if at in self._played:
                continue
            if verb == "fact":
                await self._fact(said, at)
            elif room == "worker" and verb in ("join", "renew"):
                await self._from_worker(message)
            elif room in ("hello", "load"):
                await self.nc.publish(self._subject(message), message.with_raw(self._changed(message, message.raw)))
            elif room in ("api", "admin", "request"):
                await self._ask(message, message.payload)
                if room == "request":
                    await self._read(message)

    async def _from_worker(self, message: Message) -> None:
        raw = message.raw
        joins = message.words[-1] == "join"
        for held in raw.get("holding" if joins else "held", ()):
            name = (*held[:4],)
            await until(lambda name=name: name in self.fences, WAIT_S, f"{name} placed")
            held[4] = self.fences[name]
        if not joins:
            raw["session"] = self.sessions[raw["session"]]
        now = await self._ask(message, message.with_raw(self._changed(message, raw)))
        if joins:
            answer = self.it.answer(message)
            assert answer is not None
            assert now["kind"] == "joined", now
            self.sessions[answer.raw["session"]] = now["session"]
            self._facts = 0

    async def _fact(self, said: list[Message], at: int) -> None:
        """Send this frame of facts when its members are placed; until then those behind it whose members are."""
        while True:
            ready = await until(lambda: self._ready(said, at), WAIT_S, f"{_told(said[at].raw)} placed")
            self._played.add(ready)
            raw = said[ready].raw
            self._facts += 1
            raw["no"] = self._facts
            raw["session"] = self.sessions[raw["session"]]
            for fact in raw["facts"]:
                fact[5] = self.fences[(*fact[1:5],)]
            await self._ask(said[ready], said[ready].with_raw(self._changed(said[ready], raw)))
            if ready == at:
                return

    def _ready(self, said: list[Message], at: int) -> int | None:
        """The first frame from `at` to the next join that can be said now; of nobody whom an earlier one names."""
        before: set[Name] = set()
        for later in range(at, len(said)):
            verb = said[later].words[-1]
            if verb == "join":
                break
            if verb == "fact" and later not in self._played:
                raw = said[later].raw
                if not before & _told(raw) and all(self._may_say(fact) for fact in raw["facts"]):
                    return later
                before |= _told(raw)
        return None

    def _may_say(self, fact: list[Any]) -> bool:
        """That the member is placed here, and told to start where it was held for a gang."""
        name = (*fact[1:5],)
        held = fact[0] == "started" and self._then[name][7]
        return name in (self.started if held else self.fences)

    async def _read(self, message: Message) -> None:
        """Until the scheduler has taken this message from the queue: what comes next came after that."""
        tenant, verb = message.words[1:]
        show, body = self.subjects.api(tenant, "show"), msgspec.json.encode({"job": message.raw["job"]})

        async def taken() -> bool:
            shown = Message("", "", (await self.nc.request(show, body, timeout=5)).data).raw
            return shown["kind"] == "answer" and (verb == "submit" or shown["data"]["state"] == "CANCELLED")

        await until(taken, WAIT_S, f"{verb} of {message.raw['job']} taken from the queue")

    def _changed(self, message: Message, raw: Any) -> Any:
        return raw if self.change is None else self.change(message, raw)

    async def _ask(self, message: Message, payload: bytes) -> Any:
        """The answer as plain data; noted beside the one of then, and where it says less."""
        subject = self._subject(message)
        answer = Message("", "", (await answered(self.nc, subject, payload, WAIT_S, 5)).data)
        now, then = answer.raw, self.it.answer(message)
        assert then is not None, message
        self.wrong += [f"answer on {message.subject}: {text}" for text in narrower(then.raw, now)]
        self.answers.append((message.subject, then.raw, now))
        return now

    def _subject(self, message: Message) -> str:
        return self.subjects.prefix + message.subject[len(PREFIX) :]

    async def _on_wanted(self, msg: Msg) -> None:
        raw = msgspec.msgpack.decode(msg.data)
        for place in _places(raw):
            name = _name(place)
            then = self._then.get(name)
            if then is not None and [type(each) for each in place[: len(then)]] != [type(each) for each in then]:
                self.wrong.append(f"the placement {place} is no longer of the shape of {then}")
            self.placed[name] = place
            self.fences[name] = place[4]
        self.started |= {_name(start) for start in raw.get("start", ())}

    async def _on_read(self, msg: Msg) -> None:
        """The page of output that the worker gave then."""
        kept = self._kept[_page(msgspec.msgpack.decode(msg.data))]
        assert kept is not None
        await msg.respond(kept.payload)


def _page(raw: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(raw[word] for word in ("tenant", "job", "replica", "attempt", "stream", "offset"))


def _places(raw: dict[str, Any]) -> list[list[Any]]:
    return list(raw.get("place", ()))


def _told(raw: dict[str, Any]) -> set[Name]:
    return {(*fact[1:5],) for fact in raw["facts"]}


def _name(item: list[Any]) -> Name:
    tenant, job, replica, attempt = item[:4]
    return (tenant, job, replica, attempt)
