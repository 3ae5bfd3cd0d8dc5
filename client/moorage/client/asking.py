"""Ask and ask again: one request with its answer, retried under the same id until a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import tenacity

from moorage.bus.errors import BusError, Disconnected, NoResponders, RequestTimeout
from moorage.bus.transport import Delivery
from moorage.client.errors import error_of, unanswered
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Accepted, Answer

#: of one try; an answer takes milliseconds, and a takeover some seconds in which the request is lost
TRY_S: Final = 3.0
WAIT_S_MIN: Final = 0.05
WAIT_S_MAX: Final = 1.0
_NOT_NOW: Final = frozenset({"not-leading", "busy"})
_AGAIN: Final = (RequestTimeout, NoResponders, Disconnected)

T = TypeVar("T")

decode_accepted: Final[Decoder[Accepted | Problem]] = Decoder(Accepted | Problem)
decode_batch: Final[Decoder[list[Accepted | Problem] | Problem]] = Decoder(list[Accepted | Problem] | Problem)
decode_answer: Final[Decoder[Answer | Problem]] = Decoder(Answer | Problem)
decode_done: Final[Decoder[dict[str, Any]]] = Decoder(dict[str, Any])


class Asker(Protocol):
    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Delivery: ...


class _NotNow(Exception):
    """A scheduler answered that it does not lead (another one does, or will), or that it has too much to read now."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


async def ask(
    asker: Asker,
    subject: str,
    payload: bytes,
    decode: Callable[[bytes], T | Problem],
    deadline_s: float,
    where: str,
    on_wait: Callable[[], None] | None = None,
) -> T:
    """Send until there is an answer, for `deadline_s` seconds; the payload's ids make repeats harmless.

    `where` names the server for messages; `on_wait` is called before each further try. Raises `ClientError` of the
    kind that the answer says, `NoScheduler`, `Unreachable`, `NotPermitted`, and the bus's errors for what the caller
    did wrong.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + deadline_s

    async def once() -> T:
        timeout_s = min(TRY_S, max(ends_s - loop.time(), 0.01))
        answer = decode((await asker.request(subject, payload, timeout_s)).data)
        if isinstance(answer, Problem):
            if answer.code in _NOT_NOW:
                raise _NotNow(answer)
            raise error_of(answer)
        return answer

    tries = tenacity.AsyncRetrying(
        stop=tenacity.stop_before_delay(deadline_s),
        wait=tenacity.wait_random_exponential(multiplier=WAIT_S_MIN, max=WAIT_S_MAX),
        retry=tenacity.retry_if_exception_type((*_AGAIN, _NotNow)),
        before_sleep=None if on_wait is None else lambda _: on_wait(),
        reraise=True,
    )
    try:
        result: T = await tries(once)
    except _NotNow as error:
        raise error_of(error.problem) from None
    except BusError as error:
        raise unanswered(error, where, deadline_s) from None
    return result


def done(answer: bytes) -> dict[str, Any] | Problem:
    """An operator's answer: `{"kind": "done", …}`, or the problem."""
    frame = decode_done(answer)
    if frame.get("kind") == "error":
        return _decode_problem(answer)
    return frame


_decode_problem: Final[Decoder[Problem]] = Decoder(Problem)
