"""The way of calls from a member to its program where they run in batches: holds them until their batch begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from moorage.calls.batches import Batches
from moorage.calls.member import Member
from moorage.calls.program import Link
from moorage.calls.wire import FromProgram, ToProgram

OnFrame = Callable[[FromProgram, bytes], None]


class Batcher:
    """Stands before a program: each batch is sent to it in one piece, call by call.

    `answered` gets the frames of the program, and `runs` the reply subject of each call whose batch begins.
    """

    def __init__(
        self, program: Link, member: Member, batches: Batches, answered: OnFrame, runs: Callable[[str], None]
    ) -> None:
        self._program = program
        self._member = member
        self._batches = batches
        self._answered = answered
        self._runs = runs
        member.run_in_batches(batches)
        self._held: dict[int, tuple[ToProgram, bytes]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = 0.0  # when the timer fires, which may be too early: a batch that began took what it was for

    def send(self, head: ToProgram, body: bytes = b"") -> None:
        if head.call:
            now_s = time.monotonic()
            call = self._member.running[head.call]
            self._held[head.call] = head, body
            self._batches.add(head.call, call.waited(now_s), call.left_ms(now_s), now_s)
            # a batch that is not whole begins in a turn of its own: what was read together goes into it together
            if self._batches.is_whole:
                self.begin_due()
            else:
                self._set_timer()
        elif self._batches.leave(head.cancel):
            del self._held[head.cancel]
            # the member is in the middle of its own work
            asyncio.get_running_loop().call_soon(self.on_frame, FromProgram(error=head.cancel), b"")
        else:
            self._program.send(head, body)

    def send_all(self, frames: Sequence[tuple[ToProgram, bytes]]) -> None:
        for head, body in frames:
            self.send(head, body)

    def hold(self, on: bool) -> None:
        self._program.hold(on)

    def take_back(self) -> list[int]:
        return self._program.take_back()

    def on_frame(self, head: FromProgram, body: bytes) -> None:
        """A frame of the program: the last answer of a batch lets the next one begin."""
        self._answered(head, body)
        self.begin_due()

    def begin_due(self) -> None:
        """Begin the batches that are whole, or are due and get no more of the calls that wait at other members."""
        now_s, member = time.monotonic(), self._member
        while (self._batches.is_whole or not member.gathers) and (numbers := self._batches.next(now_s)):
            member.on_batch(numbers, now_s)
            for number in numbers:
                self._runs(member.running[number].reply)
            *others, last = (self._held.pop(number) for number in numbers)
            more = [(msgspec.structs.replace(head, more=True), body) for head, body in others]
            self._program.send_all([*more, last])
        self._set_timer()

    def _set_timer(self) -> None:
        """Begin the next batch when it is due; one that gets more of the calls elsewhere begins behind these."""
        due_s = self._batches.due_s
        if due_s is None or self._member.gathers:
            return
        if self._timer is not None:
            if self._at_s <= due_s:
                return
            self._timer.cancel()
        self._at_s = due_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.begin_due()
