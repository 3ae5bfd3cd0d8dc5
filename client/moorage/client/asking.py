"""Ask and ask again: one request with its answer, retried under the same id until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import tenacity

from moorage.bus.errors import BusError, Disconnected, NoResponders, RequestTimeout, StreamGap
from moorage.bus.transport import Delivery
from moorage.client.errors import error_of, not_now, unanswered
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Accepted, Answer

if TYPE_CHECKING:
    from moorage.schemas.operate import Done

#: of one try; an answer takes milliseconds, and a takeover some seconds in which the request is lost
TRY_S: Final = 3.0
WAIT_S_MIN: Final = 0.05
WAIT_S_MAX: Final = 1.0
_NOT_NOW: Final = frozenset({"not-leading", "overloaded"})

T = TypeVar("T")

decode_accepted: Final[Decoder[Accepted | Problem]] = Decoder(Accepted | Problem)
decode_batch: Final[Decoder[list[Accepted | Problem] | Problem]] = Decoder(list[Accepted | Problem] | Problem)
decode_answer: Final[Decoder[Answer | Problem]] = Decoder(Answer | Problem)
decode_done: Final[Decoder[dict[str, Any]]] = Decoder(dict[str, Any])


def decode_act(answer: bytes) -> Done | Problem:
    """The answer to an operator's act; the frames of `schemas.operate` are read by who acts alone."""
    from moorage.schemas.operate import decode_done

    return decode_done(answer)


class Asker(Protocol):
    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Delivery: ...


class _NotNow(Exception):
    """A scheduler answered that it does not lead (another one does, or will), that its ledger takes no record, or that
    it has too much to read now."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


_RETRIED: Final = (RequestTimeout, NoResponders, Disconnected, StreamGap, _NotNow)


async def ask(
    asker: Asker,
    subject: str,
    payload: bytes,
    decode: Callable[[bytes], T | Problem],
    deadline_s: float,
    where: str,
    on_wait: Callable[[], None] | None = None,
    refused: Callable[[], BusError | None] = lambda: None,
) -> T:
    """Send until there is an answer, for `deadline_s` seconds; the payload's ids make repeats harmless.

    `where` names the server for messages; `on_wait` is called before each further try; `refused` says why the server
    does not let us in any more, if it does not. Raises `ClientError` of the kind that the answer says, `NoScheduler`,
    `Unreachable`, `NotPermitted`, and the bus's errors for what the caller did wrong.
    """
    began_s = time.monotonic()
    try:  # nearly every answer comes at once, and tenacity's machine costs ten times what asking does
        delivery = await asker.request(subject, payload, min(TRY_S, deadline_s))
        return _answered(decode(delivery.data))
    except _RETRIED as error:
        failed = error
    except BusError as error:
        raise unanswered(refused() or error, where, deadline_s) from None
    once = partial(_once, asker, subject, payload, decode, began_s + deadline_s)  # no closure: that costs every call
    return await again(once, deadline_s, where, on_wait, failed, began_s, refused)


async def _once(asker: Asker, subject: str, payload: bytes, decode: Callable[[bytes], T | Problem], ends_s: float) -> T:
    left_s = max(ends_s - time.monotonic(), 0.01)
    return _answered(decode((await asker.request(subject, payload, min(TRY_S, left_s))).data))


def _answered(answer: T | Problem) -> T:
    if isinstance(answer, Problem):
        if answer.code in _NOT_NOW:
            raise _NotNow(answer)
        raise error_of(answer)
    return answer


async def again(
    once: Callable[[], Coroutine[Any, Any, T]],
    deadline_s: float,
    where: str,
    on_wait: Callable[[], None] | None = None,
    failed: Exception | None = None,
    began_s: float | None = None,
    refused: Callable[[], BusError | None] = lambda: None,
) -> T:
    """`once` until it is answered, for `deadline_s` seconds from `began_s`; it must be harmless twice.

    `failed` is how a first try has ended already. Other arguments, and errors, as `ask`.
    """

    heard: _NotNow | None = None

    async def further() -> T:
        nonlocal failed, heard
        try:
            if failed is not None:
                first, failed = failed, None
                raise first
            return await once()
        except _NotNow as error:
            heard = error
            raise

    left_s = deadline_s if began_s is None else began_s + deadline_s - time.monotonic()
    tries = tenacity.AsyncRetrying(
        stop=tenacity.stop_before_delay(max(left_s, 0.0)),
        wait=tenacity.wait_random_exponential(multiplier=WAIT_S_MIN, max=WAIT_S_MAX),
        retry=tenacity.retry_if_exception_type(_RETRIED),
        before_sleep=None if on_wait is None else lambda _: on_wait(),
        reraise=True,
    )
    try:
        result: T = await tries(further)
    except _NotNow as error:
        raise not_now(error.problem, where, deadline_s) from None
    except BusError as error:
        if heard is not None and isinstance(error, RequestTimeout):  # the last try was too short to hear it once more
            raise not_now(heard.problem, where, deadline_s) from None
        raise unanswered(refused() or error, where, deadline_s) from None
    return result


def done(answer: bytes) -> dict[str, Any] | Problem:
    """An operator's answer: `{"kind": "done", …}`, or the problem."""
    frame = decode_done(answer)
    if frame.get("kind") == "error":
        return _decode_problem(answer)
    return frame


_decode_problem: Final[Decoder[Problem]] = Decoder(Problem)
