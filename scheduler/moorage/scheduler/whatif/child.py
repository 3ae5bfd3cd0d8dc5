"""Answers a question in a copy of this process, so that changes to the engine stay in the copy.

`fork` gives the child the leader's whole memory as of that moment for the price of copying page tables, as Redis does
for its snapshots; the leader continues meanwhile. The child uses no event loop and no connection, closes what it
inherited, has limited CPU time, and ends by `_exit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import select
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn

log = logging.getLogger("moorage.whatif")

#: a child that takes longer is killed, and its question is answered with `overloaded`
CHILD_S_MAX: Final = 20.0
#: how many questions are answered at once, and how many wait for one of those to end: in all, and of one tenant
CHILDREN_MAX: Final = 2
WAITING_MAX: Final = 64
WAITING_MAX_TENANT: Final = 16
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
#: how often to log that no child can be started
TOLD_EVERY_S: Final = 60.0
_NICE: Final = 5
_CHUNK: Final = 65_536

#: the answer of a child that failed because of a defect
FAILED: Final = b""

Work = Callable[[], bytes]


def fork(work: Work) -> tuple[int, int]:
    """Start a child that answers; return its process id and the pipe to read the answer from.

    Raises OSError if no further process or pipe can be made.
    """
    receive, send = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about other threads: the child takes no locks but those that Python resets after a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError:
        os.close(receive)
        os.close(send)
        raise
    if pid == 0:
        _be_child(work, send)
    os.close(send)
    return pid, receive


def _be_child(work: Work, send: int) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        gc.disable()  # it lives too briefly, and marking would copy every page
        _let_go(send)
        os.nice(max(0, _NICE - os.getpriority(os.PRIO_PROCESS, 0)))  # the child of a child keeps the same niceness
        seconds = int(time.process_time() + CHILD_S_MAX) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        answer = memoryview(work())
        while answer:
            answer = answer[os.write(send, answer) :]
        code = 0
    except BrokenPipeError:
        pass  # the asking process was killed, or no longer waits
    except BaseException:
        with contextlib.suppress(BaseException):
            log.exception("a forecast process failed on a request")
    finally:
        os._exit(code)


def _let_go(send: int) -> None:
    """Keep nothing of the leader's open files but stdio and the pipe.

    The descriptor numbers stay in use, for /dev/null: when an object of the leader is freed in this process it closes
    its number, and if that number belonged to a pipe of this process's own child by then, that child's answer would be
    lost.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (send, nothing):
            os.dup2(nothing, number)


def ask(work: Work, limit_s: float = CHILD_S_MAX) -> bytes | None:
    """Wait for a child's answer and return it; None if it failed or took too long. Raises OSError as `fork`."""
    return ask_all([work], limit_s)[0]


def ask_all(works: Sequence[Work], limit_s: float = CHILD_S_MAX) -> list[bytes | None]:
    """Wait for the answers of children, `CHILDREN_MAX` at once, and return them in the order of `works`.

    None stands for each that failed, or had not ended when `limit_s` had passed for all of them together. Raises
    OSError if a child cannot be started.
    """
    answers: list[bytes | None] = [None] * len(works)
    running: dict[int, _Asked] = {}  # by the pipe to read from
    left, ends_s = deque(enumerate(works)), time.monotonic() + limit_s
    try:
        while (left or running) and (wait_s := ends_s - time.monotonic()) > 0:
            while left and len(running) < CHILDREN_MAX:
                at, work = left.popleft()
                pid, receive = fork(work)
                running[receive] = _Asked(at, pid, [])
            for receive in select.select(list(running), [], [], wait_s)[0]:
                chunk = os.read(receive, _CHUNK)
                if chunk:
                    running[receive].chunks.append(chunk)
                else:
                    asked = running.pop(receive)
                    if _reap(asked.pid, receive) == 0:
                        answers[asked.at] = b"".join(asked.chunks)
    finally:
        for receive, asked in running.items():
            _kill(asked.pid, receive)
    return answers


class _Asked(NamedTuple):
    """A child that `ask_all` waits for: the index of its work, and its answer so far."""

    at: int
    pid: int
    chunks: list[bytes]


def _kill(pid: int, receive: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _reap(pid, receive)


def _reap(pid: int, receive: int) -> int:
    """Close the pipe, wait for the child's end, and return its status as `waitpid` does: 0 for success."""
    os.close(receive)
    return os.waitpid(pid, 0)[1]


class Children:
    """Asks children without blocking the event loop: at most `CHILDREN_MAX` at once. Of the rest, tenants take
    turns."""

    def __init__(self) -> None:
        #: by tenant, the next one first; "" is the scheduler itself, and operators
        self._waiting: dict[str, deque[tuple[Work, Callable[[bytes | None], None]]]] = {}
        self._running: dict[int, tuple[int, asyncio.TimerHandle]] = {}  # pipe by process id
        self._loop = asyncio.get_running_loop()
        self._silent_until_s = 0.0

    def ask(self, work: Work, told: Callable[[bytes | None], None], tenant: str = "") -> bool:
        """Have a child do `work` and pass the answer to `told`; return False if too many wait, in all or of the tenant,
        or none can be started.

        The answer is `FAILED` if the work raised or its answer is too large. It is None if the child took too long or
        was killed, or if it waited and then could not be started. After False, `told` is not called.
        """
        if len(self._running) >= CHILDREN_MAX:
            mine = self._waiting.get(tenant, ())
            if sum(map(len, self._waiting.values())) >= WAITING_MAX or len(mine) >= WAITING_MAX_TENANT:
                return False
            self._waiting.setdefault(tenant, deque()).append((work, told))
            return True
        try:
            self._start(work, told)
        except OSError as error:
            if time.monotonic() >= self._silent_until_s:
                log.warning(
                    "no forecast process can be started, so explain and plan give no forecast; jobs are not "
                    "affected: %s",
                    error,
                )
                self._silent_until_s = time.monotonic() + TOLD_EVERY_S
            return False
        return True

    def _start(self, work: Work, told: Callable[[bytes | None], None]) -> None:
        pid, receive = fork(work)
        answer = bytearray()
        self._running[pid] = (receive, self._loop.call_later(CHILD_S_MAX, os.kill, pid, signal.SIGKILL))

        def more() -> None:
            chunk = os.read(receive, _CHUNK)
            is_too_long = len(answer) > ANSWER_BYTES_MAX
            if chunk and not is_too_long:
                answer.extend(chunk)
            if len(answer) > ANSWER_BYTES_MAX and not is_too_long:
                log.error("a forecast process was killed: its answer has more than %d bytes", ANSWER_BYTES_MAX)
                os.kill(pid, signal.SIGKILL)
            elif not chunk:
                status = self._end(pid)
                failed = is_too_long or (status != 0 and os.WIFEXITED(status))
                self._pass_on(told, FAILED if failed else bytes(answer) if status == 0 else None)
                while self._waiting and len(self._running) < CHILDREN_MAX:
                    next_work, next_told = self._next()
                    if not self.ask(next_work, next_told):
                        self._pass_on(next_told, None)

        self._loop.add_reader(receive, more)

    def _next(self) -> tuple[Work, Callable[[bytes | None], None]]:
        tenant = next(iter(self._waiting))
        theirs = self._waiting.pop(tenant)
        first = theirs.popleft()
        if theirs:  # behind all others
            self._waiting[tenant] = theirs
        return first

    @staticmethod
    def _pass_on(receiver: Callable[[bytes | None], None], answer: bytes | None) -> None:
        """Pass an answer on; a defect in one receiver must not keep others from their answers."""
        try:
            receiver(answer)
        except Exception:
            log.exception("the answer of a forecast process could not be passed on")

    def _end(self, pid: int) -> int:
        receive, timer = self._running.pop(pid)
        timer.cancel()
        self._loop.remove_reader(receive)
        os.close(receive)
        return os.waitpid(pid, 0)[1]

    def close(self) -> None:
        """Kill the running children; no answer is passed on any more."""
        self._waiting.clear()
        for pid in list(self._running):
            os.kill(pid, signal.SIGKILL)
            self._end(pid)
