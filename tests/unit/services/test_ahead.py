"""A member and its program, which has calls ahead and goes on or hangs at any moment: random cases, on a pipe."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Final

import pytest

from moorage.calls.ahead import Ahead, Given
from moorage.calls.member import Call, Member
from moorage.calls.wire import ToProgram
from moorage.schemas.service import PRIORITY_DEFAULT, PRIORITY_MAX, Turn

CASES: Final = 200
STEP_S: Final = 0.0005


class Program:
    """What a member wants done, and its program. A call is over here once it is answered, or given to others."""

    def __init__(self, dice: random.Random, ahead: Ahead) -> None:
        self.dice = dice
        self.member = Member("m", self, 1, dice.choice((None, 20, 200)))
        self.member.allow(1, ahead=4)
        self.over = Counter[str]()
        self.ran = Counter[str]()
        self.now_s = 0.0
        self._frames: deque[tuple[ToProgram, str]] = deque()
        self._answers: deque[int] = deque()
        self._runs: int | None = None
        self._ahead = ahead
        self._given = Given(ahead.theirs)

    def step(self) -> None:
        """The program does one thing: it reads a frame, or answers the call that runs."""
        if self._runs is not None:
            self._answers.append(self._runs)
            self._runs = None
        elif self._frames:
            head, reply = self._frames.popleft()
            if head.call and (not head.ahead or self._given.take(head.call)):
                self._runs = head.call
                self.ran[reply] += 1

    def hear(self) -> None:
        """The member reads an answer, as `Messenger.on_frame` does."""
        call = self.member.running.get(self._answers[0]) if self._answers else None
        if self._answers and call is not None and (call.cancelled or call.started_s >= 0):
            self.over[call.reply] += not call.cancelled
            self.member.on_end(self._answers[0], self.now_s)
        if self._answers:
            self._answers.popleft()

    def run(self, number: int, call: Call, left_ms: int) -> None:
        self._frames.append((ToProgram(number), call.reply))

    def run_next(self, number: int, call: Call, left_ms: int) -> None:
        self._ahead.put(number)
        self._frames.append((ToProgram(number, ahead=True), call.reply))

    def take_back(self) -> list[int]:
        numbers = self._ahead.take_back()
        kept = self.dice.randrange(len(numbers) + 1) if self.dice.random() < 0.3 else len(numbers)
        for number in numbers[kept:]:  # the program goes on while the member takes them
            self._ahead.put(number)
        for _ in range(self.dice.randrange(6) if kept < len(numbers) else 0):
            self.step()
        return numbers[:kept] + self._ahead.take_back()

    def stop(self, number: int) -> None:
        self._frames.append((ToProgram(cancel=number), ""))

    def hand(self, to: str, call: Call | None, waited_ms: int) -> None:
        self.over.update([] if call is None else [call.reply])

    def send_on(self, call: Call, waited_ms: int) -> None:
        self.over[call.reply] += 1

    def refuse(self, call: Call, error: str, retry_after_ms: int, why: str = "") -> None:
        self.over[call.reply] += 1

    def have(self) -> None: ...

    def want(self) -> None: ...

    def want_later(self) -> None: ...

    def gathered(self) -> None: ...

    def open_room(self, is_open: bool) -> None: ...


@pytest.mark.parametrize("first", range(0, 10 * CASES, CASES))
def test_each_call_that_is_ahead_is_run_once_and_answered_or_given_to_others(first: int) -> None:
    ahead = Ahead()
    for seed in range(first, first + CASES):
        assert ahead.take_back() == []
        dice = random.Random(seed)
        program = Program(dice, ahead)
        member, sent, gave_up, rests = program.member, 0, set[str](), False
        for _ in range(dice.randrange(50, 600)):
            program.now_s += dice.choice((0, 0, 0, 0.0001, 0.0003, 0.0005, 0.012 if dice.random() < 0.05 else 0))
            act = dice.random()
            if act < 0.3:
                sent += 1
                priority = dice.choice((PRIORITY_DEFAULT, PRIORITY_DEFAULT, PRIORITY_MAX))
                wait_ms = dice.choice((5, 1000, 60_000))
                member.on_call(Call(str(sent), b"", {}, program.now_s, wait_ms, priority=priority), program.now_s)
            elif act < 0.6:
                program.step()
            elif act < 0.8:
                program.hear()
            elif act < 0.83 and sent:
                reply = str(max(1, sent - dice.randrange(8)))
                gave_up.add(reply)
                member.on_cancel(reply, program.now_s)
            elif act < 0.9:
                member.tick(program.now_s)
            elif act < 0.92:
                member.on_want("other", program.now_s)
            elif act < 0.93:
                rests = not rests
                member.on_turn(Turn("m", not rests, 100), program.now_s)
        member.on_turn(Turn("m", True, 0), program.now_s)
        for at in range(4000):
            if member.is_empty:
                break
            program.now_s += STEP_S
            program.step()
            program.hear()
            if at % 20 == 0:
                member.tick(program.now_s)
        assert member.is_empty, f"seed {seed}: {member.running}"
        assert max(program.ran.values(), default=0) <= 1, f"seed {seed}: at most once"
        wrong = [each for each in map(str, range(1, sent + 1)) if program.over[each] != 1 and each not in gave_up]
        assert not wrong, f"seed {seed}: {wrong}"
        assert max(program.over.values(), default=0) <= 1, f"seed {seed}"
        counts = member.meter.counts()
        assert sum(counts.waited) == sum(counts.ran) == member.meter.ended, f"seed {seed}: each counts once"
