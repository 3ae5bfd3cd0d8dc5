"""Implement the driver of simulated workers: claims are real, but nothing runs. Tests and benchmarks use it.

An attempt ends at once with code 0, unless `argv` says otherwise, for tests:

    ["exit", "3"]            ends at once with code 3, -64..255 (negative: as by that signal)
    ["exit", "3", "100"]     the same for replicas 0, 100, 200 and so on; the others end with code 0
    ["sleep", "1.5"]         ends with code 0 after 1.5 seconds, or by `timeout_s`, whichever is first
    ["sleep", "1.5", "3"]    ends with code 3 instead
    ["hang"]                 runs until it is ended, or until `timeout_s`
    ["fail", "no such file"] cannot be started: reported with that reason and code 127
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.capabilities import KNOWN
from moorage.schemas.driver_config import NoopBlock
from moorage.schemas.errors import refuse
from moorage.schemas.frames import LogPage, ReadLog
from moorage.schemas.job import DURATION_S_MAX, Request
from moorage.worker.driver import Assignment, Driver
from moorage.worker.session.attempt_messages import Ended, Started, StartFailed
from moorage.worker.start_codes import CODE_NOT_FOUND

#: minus SIGTERM, with which a real process would end, too
CODE_ENDED: Final = -15
CODE_TIMED_OUT: Final = -15
#: length of a reported reason
DETAIL_CHARS_MAX: Final = 200
#: exit codes, and minus the numbers of signals
CODE_MIN: Final = -64
CODE_MAX: Final = 255
_WORDS: Final = {"exit": (2, 3), "sleep": (2, 3), "hang": (1, 1), "fail": (1, 2)}


class NoopDriver(Driver):
    """A driver for simulated workers only. Its attempts touch no device and die with the agent."""

    name = "noop"
    config = NoopBlock
    capabilities = KNOWN[name]

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[AttemptName, asyncio.TimerHandle | None] = {}
        self._scripts: dict[AttemptName, tuple[float, float, int]] = {}  # since when, for how many seconds, the code

    async def close(self) -> None:
        for timer in self._running.values():
            if timer is not None:
                timer.cancel()
        self._running.clear()
        self._scripts.clear()

    def check(self, request: Request) -> None:
        run = request.workload
        if run.argv and run.items is None:  # else it is checked with the item in it
            _script(run.argv)

    def start(self, assignments: list[Assignment]) -> None:
        started: list[AttemptName] = []
        ended: list[tuple[AttemptName, int, str]] = []
        failed: list[tuple[AttemptName, int, str]] = []
        for assignment in assignments:
            name = assignment.name
            run = assignment.run
            if not run.argv:
                started.append(name)
                ended.append((name, 0, "exit"))
                continue
            word, seconds, code, why = _script(run.argv)
            if word == "fail":
                failed.append((name, code, why))
                continue
            started.append(name)
            if word == "exit":
                ended.append((name, 0 if name[2] % int(seconds) else code, "exit"))
            else:
                self._run(name, seconds, code, run.timeout_s)
        if started:
            self.report(Started(started))
        if failed:
            self.report(StartFailed(failed))
        if ended:
            self.report(Ended(ended))

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        if name in self._running:
            self._over(name, CODE_ENDED, "fence" if why == "fence" else "end")

    async def read_log(self, ask: ReadLog) -> LogPage:
        """Return an empty page: nothing runs, so there is no output."""
        name = name_in(ask)
        return LogPage(ask.attempt, ask.stream, over=ask.ended_ms > 0 and name not in self._running)

    def relimit(self, name: AttemptName, timeout_s: float) -> None:
        if name in self._running:
            if (timer := self._running[name]) is not None:
                timer.cancel()
            self._await(name, timeout_s)

    def _run(self, name: AttemptName, seconds: float, code: int, timeout_s: float | None) -> None:
        self._scripts[name] = asyncio.get_running_loop().time(), seconds, code
        self._await(name, timeout_s)

    def _await(self, name: AttemptName, timeout_s: float | None) -> None:
        began_s, seconds, code = self._scripts[name]
        reason = "exit"
        if timeout_s is not None and timeout_s < seconds:
            seconds, code, reason = timeout_s, CODE_TIMED_OUT, "timeout"
        self._running[name] = (
            asyncio.get_running_loop().call_at(began_s + seconds, self._over, name, code, reason)
            if math.isfinite(seconds)
            else None
        )

    def _over(self, name: AttemptName, code: int, reason: str) -> None:
        timer = self._running.pop(name)
        del self._scripts[name]
        if timer is not None:
            timer.cancel()
        self.report(Ended([(name, code, reason)]))


def _script(argv: list[str]) -> tuple[str, float, int, str]:
    """Return (word, seconds, code, why); the seconds of `hang` are infinite, for `exit` they are of which replicas.

    Raises Refused for an argv that the module's docstring does not list.
    """
    word = argv[0]
    least, most = _WORDS.get(word, (0, 0))
    try:
        if not least <= len(argv) <= most:
            raise ValueError
        if word == "exit":
            return word, float(_every(argv[2])) if len(argv) == 3 else 1.0, _code(argv[1]), ""
        if word == "sleep":
            return word, _seconds(argv[1]), _code(argv[2]) if len(argv) == 3 else 0, ""
        if word == "hang":
            return word, math.inf, 0, ""
        return word, 0.0, CODE_NOT_FOUND, argv[1][:DETAIL_CHARS_MAX] if len(argv) == 2 else "start-failed"
    except ValueError:
        raise refuse(
            "invalid-argument",
            "the driver noop does not know this argv",
            field="$.run.argv",
            found=" ".join(argv)[:80],
            allowed="none, or exit <code> [every], sleep <seconds> [code], hang, fail [why];"
            f" codes {CODE_MIN}..{CODE_MAX}",
        ) from None


def _every(text: str) -> int:
    """Return of how many replicas one ends with the code. Raises ValueError for less than 1."""
    every = int(text)
    if every < 1:
        raise ValueError
    return every


def _code(text: str) -> int:
    """Return an exit code. Raises ValueError for a code outside its bounds, which no report could carry."""
    code = int(text)
    if not CODE_MIN <= code <= CODE_MAX:
        raise ValueError
    return code


def _seconds(text: str) -> float:
    """Return a number of seconds. Raises ValueError for text that is no number in 0..`DURATION_S_MAX`, such as NaN."""
    seconds = float(text)
    if not 0 <= seconds <= DURATION_S_MAX:
        raise ValueError
    return seconds
