"""Where the calls of a client are: their members are asked, of calls that take long and of all that a break may have
lost.

A call passes through the caller's connection, servers and a member's connection, and each of them may take it along as
it breaks. Nobody but the caller can know. So the members of its service are asked which of them has it. One that has
answered it meanwhile sends the answer again. A call that none of them has is lost, and ends at once.

That goes for calls that a member had not read when it was killed. Its worker says that it has ended: to inboxes of
which it had calls, and for a minute to all who ask.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from moorage.bus.errors import BusError, Disconnected, NoResponders, RequestTimeout
from moorage.bus.inbox import Answers
from moorage.bus.transport import Delivery
from moorage.schemas.codec import encode
from moorage.schemas.service import ASKED_MAX, ENDED, Found, Sought
from moorage.schemas.subjects import asked_of
from moorage.schemas.unreadable import UNREADABLE

if TYPE_CHECKING:
    from moorage.client.transport import Link

#: how often the calls under way are looked at
LOOK_S: Final = 0.25
#: a call that is under way for so long is asked for: from then on its member is known
ASK_AFTER_S: Final = 1.0
#: its member is asked again, or where nothing tells whether it is there, all of them
ASK_AGAIN_S: Final = 5.0
#: how long their answers are waited for, and where a member is known to have ended; and if none came, how much
#: later they are asked again
ANSWER_S: Final = 0.5
ENDED_ANSWER_S: Final = 0.25
SILENCE_S: Final = 1.0
#: a call that none has is lost once they have said so so often: it may have been on its way between two of them
ROUNDS: Final = 3
#: members that lost their connections with this client are given so long from when it is back
BACK_S: Final = 2.0
#: and those that may be away, while others are there, so long
SILENT_S: Final = 7.0
#: one that had the call, or that may have it where no other one serves, keeps its answer for so long
KEPT_S: Final = 60.0

_decode: Final = msgspec.json.Decoder(Found).decode


class Lost(Disconnected):
    """No member of its service has a call any more; it may have run."""


class Sent:
    """A call that is under way."""

    __slots__ = ("answer", "doubt_s", "due_s", "had_s", "is_asked", "is_doubted", "member", "noes", "outlived_break",
                 "outlived_member", "reply", "rounds", "subject", "token", "was_cut")  # fmt: skip

    def __init__(self, subject: str, reply: str, token: int, answer: asyncio.Future[Any], now_s: float) -> None:
        self.subject = subject
        self.reply = reply
        self.token = token
        self.answer = answer
        self.due_s = now_s + ASK_AFTER_S
        self.is_asked = False
        self.is_doubted = False  # a member that has it not shall say so
        self.was_cut = self.outlived_break = False  # the connection was lost since a member had it; since it was sent
        self.outlived_member = False  # a member has ended of late, and none is known to have the call
        self.member = ""  # which had it last
        self.had_s = 0.0  # when that said so
        self.doubt_s = 0.0  # since when none has it; 0 while one does
        self.rounds = 0  # how often none had it since then
        self.noes: set[str] = set()  # the members that said so

    def doubt(self, at_s: float) -> None:
        """Ask all members at that time."""
        self.is_doubted, self.due_s, self.doubt_s, self.rounds, self.noes = True, at_s, 0.0, 0, set()

    def is_at(self, member: str, now_s: float) -> None:
        """A member says that it has the call."""
        self.member, self.had_s, self.due_s = member, now_s, now_s + ASK_AGAIN_S
        self.is_doubted = self.was_cut = self.outlived_member = False


class _Question(NamedTuple):
    """Calls with the same one are asked for together."""

    subject: str  # the service's
    member: str  # the one that is asked; "" for all
    is_of_all: bool  # those that have it not shall say so
    was_cut: bool
    outlived_member: bool = False


class _Round:
    """What members say to one question."""

    def __init__(self) -> None:
        self.said: set[str] = set()
        self.is_nobody_there = False
        self.is_untold = False  # a member is there that knows no such question
        self.has_one_ended = False


class Whereabouts:
    """The calls of one client over one connection, and the inbox of their answers.

    `begin` runs a coroutine beside its caller.
    """

    def __init__(self, link: Link, answers: Answers, begin: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.answers = answers
        self._link = link
        self._begin = begin
        self._calls: dict[str, Sent] = {}
        self._members: dict[str, dict[str, float]] = {}  # by service, when a member of it was heard last
        self._unheard: set[str] = set()  # services whose members were asked, and did not answer at all
        self._timer: asyncio.TimerHandle | None = None
        self._back_s = float("-inf")  # when the connection was there again last
        link.on_back(self._on_back)
        answers.on_word[ENDED] = self._on_ended

    def send(self, subject: str, token: int, answer: asyncio.Future[Any]) -> str:
        """A call of the service with this subject is to be sent; return its reply subject."""
        reply = self.answers.reply_subject(token)
        self._calls[reply] = Sent(subject, reply, token, answer, time.monotonic())
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        return reply

    @property
    def prefix(self) -> str:
        """The prefix of the inbox."""
        return self.answers.base.rpartition(".")[0]

    def is_unheard(self, subject: str) -> bool:
        """Return whether members of this service are there, and nothing of what they say arrives."""
        return subject in self._unheard and subject not in self._members

    def over(self, reply: str, member: str = "") -> None:
        """A call is over for its caller; this member has answered it."""
        call = self._calls.pop(reply, None)
        if member and call is not None:
            self._note(call.subject, member, time.monotonic())

    def heard(self, subject: str, since_s: float) -> list[str]:
        """Return the members of a service that were heard since then, by the monotonic clock."""
        return [member for member, heard_s in self._members.get(subject, {}).items() if heard_s >= since_s]

    def gone(self, subject: str, member: str) -> None:
        """A member of a service takes no calls any more."""
        self._members.get(subject, {}).pop(member, None)

    def _note(self, subject: str, member: str, now_s: float) -> None:
        self._members.setdefault(subject, {})[member] = now_s

    def _on_back(self) -> None:
        self._back_s = now_s = time.monotonic()
        for call in self._calls.values():
            call.was_cut = call.outlived_break = True
            call.doubt(now_s)
        self._look()

    def _on_ended(self, delivery: Delivery) -> None:
        """A member of a service has ended: which of its calls it had not read, their callers alone can find out."""
        subject, now_s = delivery.data.decode(errors="replace"), time.monotonic()
        for call in [each for each in self._calls.values() if each.subject == subject]:
            call.outlived_member = True
            if not call.is_doubted:
                call.doubt(now_s)
        self._look()

    def _look(self) -> None:
        """Ask for the calls that are due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._calls:
            return
        if self._link.is_connected:
            now_s = time.monotonic()
            due = [each for each in self._calls.values() if each.due_s <= now_s and not each.is_asked]
            due = [each for each in due if not each.answer.done()]  # of some, the reader has not come to the end
            due.sort(key=_question)
            for question, calls in groupby(due, _question):
                for some in _by(ASKED_MAX, calls):
                    self._begin(self._ask(question, some))
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    async def _ask(self, question: _Question, calls: list[Sent]) -> None:
        """Ask the members of a service, or one of them, for calls."""
        missed, over = {call.reply: call for call in calls}, self._link.reconnects
        for call in calls:
            call.is_asked = True
        try:
            heard = await self._hear(question, missed)
        except (BusError, RuntimeError):  # there is no right to ask, or the client is closed
            for call in calls:
                call.due_s = float("inf")
            return
        finally:
            for call in calls:
                call.is_asked = False
        now_s = time.monotonic()
        for call in missed.values():
            # what was asked over another connection tells nothing: the question of this one is due already
            if call.reply in self._calls and heard is not None and over == self._link.reconnects:
                self._judge(call, heard, now_s, were_all_asked=question.is_of_all and not question.member)
        if heard is not None and heard.has_one_ended:
            self._look()

    async def is_heard(self, subject: str) -> bool | None:
        """Ask the members of a service, and return whether any of them can answer here; None if none is there. Raises
        BusError."""
        heard = await self._hear(_Question(subject, "", is_of_all=True, was_cut=False), {})
        return None if heard is None or heard.is_nobody_there else bool(heard.said) or heard.is_untold

    async def seek(self, subject: str) -> None:
        """Ask which members a service has: those that are there are `heard`. Raises BusError."""
        await self._hear(_Question(subject, "", is_of_all=True, was_cut=False), {}, are_all_awaited=True)
        kept_s, known = time.monotonic() - KEPT_S, self._members.get(subject, {})
        for member in [each for each, heard_s in known.items() if heard_s < kept_s]:
            del known[member]

    async def _hear(
        self, question: _Question, missed: dict[str, Sent], *, are_all_awaited: bool = False
    ) -> _Round | None:
        """Ask, and return what is said; None without a connection. Those that are found leave `missed`."""
        heard = _Round()
        subject, member, is_of_all, was_cut, outlived_member = question
        to, sought = asked_of(subject, member), Sought(list(missed), is_of_all, was_cut)

        def is_last(delivery: Delivery) -> bool:
            try:
                found = _decode(delivery.data)
            except UNREADABLE:  # a member of an earlier release takes it for a call
                heard.is_untold = True
                return False
            heard.said.add(found.member)
            now_s = time.monotonic()
            self._note(subject, found.member, now_s)
            for reply in found.calls:
                call = missed.pop(reply, None)
                if call is not None:
                    call.is_at(found.member, now_s)
            if found.ended:
                heard.has_one_ended = True
                for call in missed.values():
                    call.outlived_member = True
            # where one has ended, all are asked at once
            return not are_all_awaited and (not missed or (found.ended and not is_of_all))

        answer_s = ENDED_ANSWER_S if outlived_member else ANSWER_S
        token, future = self.answers.open(to, answer_s, is_last, is_kept=False, in_all=True)
        try:
            if not await self._link.publish(to, encode(sought), self.answers.reply_subject(token), {}):
                return None
            await future
        except NoResponders:
            heard.is_nobody_there = True
        except RequestTimeout:
            pass
        finally:
            self.answers.abandon(token)
        return heard

    def _judge(self, call: Sent, heard: _Round, now_s: float, *, were_all_asked: bool) -> None:
        """No member that was asked has a call: ask on, or end it as lost."""
        if not were_all_asked:
            call.doubt(now_s)
        elif heard.is_untold:
            call.doubt(now_s + ASK_AGAIN_S)
        elif not (heard.said or heard.is_nobody_there):
            self._unheard.add(call.subject)
            call.doubt(now_s + SILENCE_S)
        else:
            call.doubt_s = call.doubt_s or now_s
            call.rounds += 1
            call.noes |= heard.said
            if self._is_lost(call, now_s):
                self.answers.fail(call.token, Lost(call.subject))

    def _is_lost(self, call: Sent, now_s: float) -> bool:
        if call.rounds < ROUNDS or now_s - self._back_s < BACK_S:
            return False
        if call.member and call.member not in call.noes:
            return now_s - call.had_s > KEPT_S
        if not call.noes:
            return now_s - call.doubt_s > KEPT_S
        if now_s - call.doubt_s > SILENT_S or call.member:
            return True
        if not (call.outlived_break or call.outlived_member):  # it was lost at a member, which may be away with it
            return False
        known, said_s = self._members[call.subject], KEPT_S if call.outlived_break else SILENT_S
        for member in [each for each, heard_s in known.items() if now_s - heard_s > KEPT_S]:
            del known[member]
        return all(member in call.noes for member, heard_s in known.items() if now_s - heard_s <= said_s)


def _question(call: Sent) -> _Question:
    member = "" if call.is_doubted else call.member
    return _Question(call.subject, member, call.is_doubted or bool(member), call.was_cut, call.outlived_member)


def _by(most: int, calls: Iterable[Sent]) -> Iterable[list[Sent]]:
    rest = iter(calls)
    while some := list(islice(rest, most)):
        yield some
