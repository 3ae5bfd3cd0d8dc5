"""Requests with retries: send one under the same id until it is answered, or until a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import tenacity

from moorage.bus.errors import BusError, Disconnected, NoResponders, RequestTimeout, StreamGap
from moorage.client.errors import error_of, not_now, unanswered
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Accepted, Answer

if TYPE_CHECKING:
    from moorage.schemas.operate import Done

#: longest wait of one try. An answer takes milliseconds; during a takeover requests are lost for some seconds
TRY_S: Final = 3.0
#: the same of `plan`, whose answer a scheduler computes in seconds: the next try would begin it anew
PLAN_TRY_S: Final = 10.0
#: a try that has waited so long is said to who waits: `on_wait`
SAID_AFTER_S: Final = 2.0
WAIT_S_MIN: Final = 0.05
WAIT_S_MAX: Final = 1.0
_NOT_NOW: Final = frozenset({"not-leading", "overloaded", "behind"})

T = TypeVar("T")

decode_accepted: Final[Decoder[Accepted | Problem]] = Decoder(Accepted | Problem, from_leader=True)
decode_batch: Final[Decoder[list[Accepted | Problem] | Problem]] = Decoder(
    list[Accepted | Problem] | Problem, from_leader=True
)
decode_answer: Final[Decoder[Answer | Problem]] = Decoder(Answer | Problem, from_leader=True)


def decode_act(answer: bytes) -> Done | Problem:
    """Return the decoded answer to an operator's act."""
    from moorage.schemas.operate import decode_done

    return decode_done(answer)


class Asker(Protocol):
    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes: ...


class NotNow(Exception):
    """A scheduler answered that it does not lead, that it cannot append to its ledger, or that it is overloaded; or
    something that is being made is not there yet."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


_RETRIED: Final = (RequestTimeout, NoResponders, Disconnected, StreamGap, NotNow)


class Asking:
    """Sends a client's requests, and repeats each until it is answered or its deadline passes.

    `where` is the server's name in errors, `leaf` the place whose leaf node it is, or "". `refused` is set while the
    server refuses the client at reconnects, and says why. `on_wait` is called where the first try has waited for
    `SAID_AFTER_S`, and before each further one; `put_off` then has the "not now" that was answered to the last one, or
    None if there was no answer. `unclear` is set once a request was sent whose answer did not come: it may have been
    served. `asked` is the verb of the last request.
    """

    def __init__(self, where: str = "", on_wait: Callable[[], None] | None = None) -> None:
        self.where = where
        self.leaf = ""
        self.refused: BusError | None = None
        self.put_off: Problem | None = None
        self.unclear = False
        self.asked = ""
        self._on_wait = on_wait

    async def ask(
        self,
        asker: Asker,
        subject: str,
        payload: bytes,
        decode: Callable[[bytes], T | Problem],
        deadline_s: float,
    ) -> T:
        """Send a request until it is answered, for at most `deadline_s` seconds, and return the decoded answer.

        Repeats are harmless, because the payload has an id. Raises the `ClientError` that the answer names,
        `NoScheduler`, `Unreachable`, `NotPermitted`, and the bus's errors for a mistake of the caller.
        """
        ends_s = time.monotonic() + deadline_s
        self.asked = subject.rpartition(".")[2]
        try_s = PLAN_TRY_S if self.asked == "plan" else TRY_S
        said = None if self._on_wait is None else asyncio.get_running_loop().call_later(SAID_AFTER_S, self._on_wait)
        try:  # the first try does without tenacity, which costs ten times as much: nearly every request needs one alone
            return answered(decode(await asker.request(subject, payload, min(try_s, deadline_s))))
        except (BusError, NotNow) as error:
            failed = error
        finally:
            if said is not None:
                said.cancel()
        if isinstance(failed, BusError) and not isinstance(failed, _RETRIED):
            raise unanswered(self.refused or failed, self.where, deadline_s, self.leaf) from None
        once = partial(_once, asker, subject, payload, decode, try_s, ends_s)
        return await self._try_on(_Tries(once, failed), deadline_s, ends_s)

    async def again(self, once: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """Call `once`, which must be idempotent, and again for at most `deadline_s` seconds if no answer came.

        Raises as `ask`.
        """
        return await self._try_on(_Tries(once), deadline_s, time.monotonic() + deadline_s)

    async def _try_on(self, tries: _Tries[T], deadline_s: float, ends_s: float) -> T:
        until_answered = tenacity.AsyncRetrying(
            stop=tenacity.stop_before_delay(max(ends_s - time.monotonic(), 0.0)),
            wait=tenacity.wait_random_exponential(multiplier=WAIT_S_MIN, max=WAIT_S_MAX),
            retry=tenacity.retry_if_exception(self._may_pass),
            before_sleep=self._before_sleep,
            reraise=True,
        )
        try:
            result: T = await until_answered(tries.next)
        except NotNow as error:
            raise not_now(error.problem, self.where, deadline_s) from None
        except BusError as error:
            self._on_no_answer(error)
            heard, told = tries.heard, self.refused or error
            if heard is not None and isinstance(told, RequestTimeout):  # the last try was too short for this answer
                raise not_now(heard.problem, self.where, deadline_s) from None
            raise unanswered(told, self.where, deadline_s, self.leaf) from None
        return result

    def _may_pass(self, failed: BaseException) -> bool:
        """Return whether a further try may help: while the server refuses the key, none is even sent."""
        return isinstance(failed, _RETRIED) and self.refused is None

    def _before_sleep(self, state: tenacity.RetryCallState) -> None:
        failed = state.outcome.exception() if state.outcome is not None else None
        self.put_off = failed.problem if isinstance(failed, NotNow) else None
        self._on_no_answer(failed)
        if self._on_wait is not None:
            self._on_wait()

    def _on_no_answer(self, failed: BaseException | None) -> None:
        self.unclear = self.unclear or isinstance(failed, RequestTimeout | Disconnected)


class _Tries(Generic[T]):
    """The tries of one request. If the first was made already, it is `failed`. `heard` is the last "not now"."""

    def __init__(self, once: Callable[[], Awaitable[T]], failed: Exception | None = None) -> None:
        self.heard: NotNow | None = None
        self._once = once
        self._failed = failed

    async def next(self) -> T:
        failed, self._failed = self._failed, None
        try:
            if failed is not None:
                raise failed
            return await self._once()
        except NotNow as error:
            self.heard = error
            raise


async def _once(
    asker: Asker, subject: str, payload: bytes, decode: Callable[[bytes], T | Problem], try_s: float, ends_s: float
) -> T:
    left_s = max(ends_s - time.monotonic(), 0.01)
    return answered(decode(await asker.request(subject, payload, min(try_s, left_s))))


def answered(answer: T | Problem) -> T:
    """Return the answer, unless it is a problem. Raises the `ClientError` of the problem; `NotNow` for a "not now"."""
    if isinstance(answer, Problem):
        if answer.code in _NOT_NOW:
            raise NotNow(answer)
        raise error_of(answer)
    return answer
