"""A handle on one job, from its id alone: follow it, wait for it, ask about it, end it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.client.errors import JobFailed
from moorage.client.values import Duration, age, seconds
from moorage.client.watch import Piece, Watch
from moorage.schemas.frames import Accepted, Change, Event
from moorage.schemas.job import SUCCEEDED, TERMINAL

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: the end of the output that a failure carries
TAIL_LINES: Final = 20
TAIL_CHARS_MAX: Final = 16 * 1024


class Result(msgspec.Struct, frozen=True):
    """How a job ended. `code` is the exit status of the member that decided it: negative is minus the signal, None
    where nothing ran. `changes` are the transitions that were seen, in order.

    `stdout`, `stderr` and `lost_bytes` (how much of them is known to be missing) are filled by `run` alone: output is
    said, not kept, so they are best effort.
    """

    job: str
    state: str
    code: int | None = None
    why: str = ""
    changes: list[Change] = []
    stdout: str = ""
    stderr: str = ""
    lost_bytes: int = 0


class Job:
    """Made by `AsyncClient.submit` and `AsyncClient.job`; needs no memory of the submit.

    `accepted` is the scheduler's answer where this handle came from a submit. `state`, `gpu` (the token of what it
    asks for) and `worker` are what was last seen here.
    """

    def __init__(self, client: AsyncClient, id: str, accepted: Accepted | None = None, gpu: str = "") -> None:
        self.id = id
        self.accepted = accepted
        self.state = accepted.state if accepted is not None else ""
        self.gpu = gpu
        self.worker = ""
        self._client = client
        self._result: Result | None = None
        self._began_s = time.monotonic() if accepted is not None and not accepted.duplicate else None

    def __repr__(self) -> str:
        words = [self.id, "of", self._client.tenant, self.state or "not asked yet", self.gpu]
        if self.worker:
            words.append(f"on {self.worker}")
        if self._began_s is not None:
            words.append(f"accepted {age((time.monotonic() - self._began_s) * 1000)} ago")
        return f"<Job {' '.join(filter(None, words))}>"

    async def events(self, timeout: Duration | None = None) -> AsyncIterator[Event]:
        """Every transition from acceptance on, each once and in order; ends by itself when the job is over.

        The first event holds all transitions so far (the scheduler keeps the last 64). `timeout` bounds it in all.
        Raises `NotFound`, `NoScheduler`, `NotPermitted`, `TimedOut`.
        """
        async with Watch(self._client, self.id) as watch:
            async for item in watch.follow(None if timeout is None else seconds(timeout)):
                if isinstance(item, Event):
                    self.saw(item)
                    yield item

    async def logs(self, timeout: Duration | None = None) -> AsyncIterator[Piece]:
        """The output from now on, until the job is over; what was said before is not kept. Raises as `events`."""
        async with Watch(self._client, self.id, output=True) as watch:
            async for item in watch.follow(None if timeout is None else seconds(timeout)):
                if isinstance(item, Piece):
                    yield item
                else:
                    self.saw(item)

    async def result(self, timeout: Duration | None = None) -> Result:
        """Wait until the job is over. `timeout` defaults to the client's `wait_timeout`.

        Raises `JobFailed` unless it SUCCEEDED, `TimedOut` (the job goes on), `NotFound`, `NoScheduler`.
        """
        timeout_s = self._client.wait_timeout_s if timeout is None else seconds(timeout)
        if self._result is not None:
            return _succeeded(self._result)
        watching = Outcome(self.id)
        async with Watch(self._client, self.id, output=True) as watch:
            async for item in watch.follow(timeout_s):
                watching.take(item)
                if isinstance(item, Event):
                    self.saw(item)
                if watch.state == SUCCEEDED:
                    break  # the end of its output is for those that failed
        self._result = watching.result(watch.shown)
        return _succeeded(self._result, watching.tail)

    async def cancel(self, reason: str = "", by: str = "") -> dict[str, Any]:
        """Cancel at any stage; answered once it is in the ledger. `{"cancelled": …, "was": <state>}`; idempotent.

        Its transitions keep the reason, and `by` as the name that you said (`Change.said`).
        """
        return await self._client.read("cancel", {"job": self.id, "reason": reason, "by": by})

    async def show(self) -> dict[str, Any]:
        """The whole job: request, replicas, transitions. Raises `NotFound`."""
        data = await self._client.read("show", {"job": self.id})
        self.learn(data)
        return data

    async def explain(self) -> dict[str, Any]:
        """Why it is where it is: one dominant reason, the counts, its place in the queue. Raises `NotFound`."""
        return await self._client.read("explain", {"job": self.id})

    # -- what others of this room have seen of it

    def saw(self, event: Event) -> None:
        """Keep what an event says of the job as it is now."""
        self.state = event.state
        for change in event.changes:
            if change.state == "ACCEPTED" and self._began_s is None:
                self._began_s = time.monotonic() - max(time.time() - change.time_ms / 1000, 0)
            self.worker = change.worker or self.worker

    def learn(self, row: dict[str, Any]) -> None:
        """Keep what `show` or `ls` says of the job as it is now."""
        self.state = row["state"]
        self.gpu = row.get("gpu", self.gpu)
        self.worker = row.get("worker", self.worker)
        if "age_ms" in row:
            self._began_s = time.monotonic() - row["age_ms"] / 1000

    def ended(self, result: Result) -> None:
        """It is over, and how; `result` answers at once from now on."""
        self.state, self._result = result.state, result

    @property
    def known_result(self) -> Result | None:
        """How it ended where that was seen here; asks nothing and raises nothing."""
        return self._result


def _succeeded(result: Result, tail: str = "") -> Result:
    if result.state != SUCCEEDED:
        raise JobFailed(result, tail)
    return result


class Outcome:
    """Gathers what a `Watch` yields into a `Result` and the tail of the output."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._state = ""
        self._why = ""
        self._changes: list[Change] = []
        self._tail: deque[str] = deque()
        self._tail_chars = 0

    def take(self, item: Event | Piece) -> None:
        if isinstance(item, Event):
            self._state, self._why = item.state, item.why or self._why
            self._changes += item.changes
            return
        self._tail.append(item.text)
        self._tail_chars += len(item.text)
        while self._tail_chars > TAIL_CHARS_MAX and len(self._tail) > 1:
            self._tail_chars -= len(self._tail.popleft())

    @property
    def tail(self) -> str:
        """The last lines of the output that came while it was watched."""
        return "\n".join("".join(self._tail)[-TAIL_CHARS_MAX:].splitlines()[-TAIL_LINES:])

    @property
    def decided(self) -> Change | None:
        """The transition that made the job's state what it is; None where it was not seen."""
        ended = [change for change in self._changes if change.state in TERMINAL]
        return next((change for change in ended if change.state == self._state and change.code), None) or next(
            (change for change in reversed(ended) if change.state == self._state), None
        )

    def result(self, shown: dict[str, Any] | None = None) -> Result:
        decided = self.decided
        code = decided.code if decided is not None else (shown or {}).get("code")
        why = decided.why if decided is not None else self._why
        return Result(self.job, self._state, code, why, self._changes)
