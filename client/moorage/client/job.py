"""A handle on one job, which needs nothing but its id: follow it, wait for it, ask about it, end it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.client import watch as watching
from moorage.client.durations import Duration, age, seconds
from moorage.client.errors import JobFailed, NotFound
from moorage.client.steps import Step, step_of
from moorage.client.stored_output import Joiner, Piece, newest_attempts, tail_of
from moorage.client.watch import Watch, behind, too_late
from moorage.schemas.capabilities import driver_of
from moorage.schemas.errors import ENDED_AS_ASKED
from moorage.schemas.frames import Accepted, Change, Event
from moorage.schemas.gpu import format_token
from moorage.schemas.job import ACCEPTED, CANCELLED, CANCELLING, ENDING, EXITED, FAILED, SUCCEEDED, TERMINAL

if TYPE_CHECKING:
    from moorage.client.beginning import Beginning
    from moorage.client.client import AsyncClient
    from moorage.client.handlers import Heard, OnProgress
    from moorage.schemas.job import Request

#: the end of the output that a failure carries
TAIL_LINES: Final = 20
TAIL_CHARS_MAX: Final = 16 * 1024


class Result(msgspec.Struct, frozen=True):
    """How a job ended. `code` is the exit status of the member that decided it: negative is minus the signal, 0 where
    all succeeded, None where nothing ran. `changes` are the transitions that were seen, in order.

    `value` is what a handler returned, of several replicas a list; None for other jobs, and where nothing was kept.
    `stdout`, `stderr` and `lost_bytes` (how much of them is known to be missing) are filled by `run` alone.
    """

    job: str
    state: str
    code: int | None = None
    why: str = ""
    changes: list[Change] = []
    stdout: str = ""
    stderr: str = ""
    lost_bytes: int = 0
    value: Any = None


class Job:
    """Made by `AsyncClient.submit` and `AsyncClient.job`; needs no memory of the submit.

    `accepted` is the scheduler's answer if this handle came from a submit. `state`, `gpu` (the token of what the job
    asks for) and `worker` are as last seen here.
    """

    __slots__ = (
        "_began_s",
        "_beginning",
        "_client",
        "_gpu",
        "_request",
        "_result",
        "_valued",
        "accepted",
        "id",
        "state",
        "worker",
    )

    def __init__(
        self,
        client: AsyncClient,
        id: str,
        accepted: Accepted | None = None,
        request: Request | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        self.id = id
        self.accepted = accepted
        self.state = accepted.state if accepted is not None else ""
        self.worker = ""
        self._gpu = ""
        self._request = request
        self._beginning = beginning if accepted is not None and not accepted.duplicate else None
        self._valued = False
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

    @property
    def tenant(self) -> str:
        """Whose job it is: that of the client it came from."""
        return self._client.tenant

    @property
    def gpu(self) -> str:
        """The token of what it asks for, as `2xH100`; `-` for no GPU, "" where that was not seen here."""
        if not self._gpu and self._request is not None:
            self._gpu = format_token(self._request.effective_gpu, self._request.replicas)
        return self._gpu

    async def events(self, timeout: Duration | None = None) -> AsyncIterator[Event]:
        """Every transition from acceptance on, each once and in order; ends by itself when the job is over.

        The first event holds all transitions so far, also of a job that was over long ago, while its history is kept (a
        week by default). Events without a transition tell why the job waits, if this client follows only a few jobs
        (see `feed.CROWD`). `timeout` bounds the whole iteration. Raises `NotFound`, `NoScheduler`, `NotPermitted`,
        `TimedOut`.
        """
        async with Watch(self._client, self.id, ahead=True) as watch:
            async for item in watch.follow(None if timeout is None else seconds(timeout)):
                if isinstance(item, Event):
                    self.saw(item)
                    yield item

    async def steps(self, timeout: Duration | None = None) -> AsyncIterator[Step]:
        """The transitions of `events` one by one, each as its own type: `match step: case Placed(worker=w): …`."""
        async for event in self.events(timeout):
            for change in event.changes:
                yield step_of(change)

    async def logs(
        self,
        timeout: Duration | None = None,
        *,
        follow: bool = True,
        tail: int | None = None,
        replica: int | None = None,
        attempt: int | None = None,
    ) -> AsyncIterator[Piece]:
        """The output from its beginning, or with `tail` from the last lines of each stream: what the workers keep of
        each replica's newest attempt, then what comes, without gap or double, until the job is over.

        `follow=False` ends with what is kept now, and so does a given `attempt`; `replica` chooses one replica. Raises
        `NoOutput` if no output is available any more, and what `events` raises.
        """
        given = 0
        if follow and attempt is None:
            async with Watch(self._client, self.id, past=True, tail=tail, replica=replica, ahead=True) as watch:
                async for item in watch.follow(None if timeout is None else seconds(timeout)):
                    if isinstance(item, Piece):
                        given += 1
                        yield item
                    else:
                        self.saw(item)
            joiner = watch.joiner
        else:
            joiner = Joiner(self._client, self.id, tail)
            newest = newest_attempts(await self.show())
            async for piece in joiner.kept_of(newest, replica, attempt):
                given += 1
                yield piece
        if joiner is not None and joiner.trouble is not None and not given:
            raise joiner.trouble

    async def result(self, timeout: Duration | None = None, on_progress: OnProgress | None = None) -> Result:
        """Wait until the job is over. `timeout` defaults to the client's `wait_timeout`.

        The result of a handler's job has the `value` that the function returned, read from the tenant's bucket if it is
        large or was not heard; `on_progress` is called with each `Progress` that is heard meanwhile. Raises `JobFailed`
        unless the job SUCCEEDED, `TimedOut` (the job goes on), `NotFound`, `NoScheduler`.
        """
        timeout_s = self._client.wait_timeout_s if timeout is None else seconds(timeout)
        if self._result is None:
            return await self._watched_to_its_end(timeout_s, on_progress)
        if self._result.state != SUCCEEDED:
            raise JobFailed(self._result)
        if not self._valued:
            await self._add_value({} if self._request is not None else await self.show(), None)
        return self._result

    async def _watched_to_its_end(self, timeout_s: float, on_progress: OnProgress | None) -> Result:
        """Who awaits the result of a job of its own is likely to await the next one's as well: so the client stands."""
        beginning, self._beginning = self._beginning, None
        if self._request is None:
            watch = Watch(self._client, self.id, output=True, ahead=True)
            return await self._watched(watch, timeout_s, on_progress)
        feed = self._client.feed
        if not feed.stands_on():
            await feed.stand()
        began_s = asyncio.get_running_loop().time()
        driver = self._request.workload.driver
        can = self._client.drivers.can(driver)
        listens = can.returns_value or not can.keeps_output
        if beginning is not None and beginning.is_whole and not listens and not feed.is_refused:
            outcome = Outcome(self.id)
            if await self._heard_to_its_end(beginning, timeout_s) and outcome.take_all(beginning.events):
                return await self._over(outcome, {}, None)
        # output that its worker keeps is asked for only where the job failed
        watch = Watch(
            self._client,
            self.id,
            output=listens,
            beginning=beginning,
            driver=driver,
            ahead=True,
            began_s=began_s,
        )
        if beginning is not None and beginning.is_stale:
            watch.refresh()
        return await self._watched(watch, timeout_s, on_progress)

    async def _heard_to_its_end(self, beginning: Beginning, timeout_s: float) -> bool:
        """Nothing but the tenant's frames is needed for it, as far as they are whole."""
        feed, watches = self._client.feed, self._client.watches
        feed.attend(self.id, beginning)
        watches.add(beginning)
        try:
            return await beginning.ended(self._client.waits, self.saw, watching.REPAIR_S_FIRST, timeout_s)
        except TimeoutError:
            raise too_late(self.id, self.state, timeout_s) from None
        finally:
            watches.discard(beginning)
            feed.dismiss(self.id, beginning)

    async def _watched(self, watch: Watch, timeout_s: float, on_progress: OnProgress | None) -> Result:
        outcome = Outcome(self.id)
        heard: Heard | None = None
        async with watch:
            async for item in watch.follow(timeout_s):
                outcome.take(item)
                if isinstance(item, Event):
                    self.saw(item)
                elif watch.can.returns_value:
                    if heard is None:
                        from moorage.client.handlers import Heard

                        heard = Heard(on_progress)
                    heard.take(item)
                if watch.state == SUCCEEDED:
                    break  # the end of its output is for those that failed
        return await self._over(outcome, watch.shown, heard)

    async def _over(self, outcome: Outcome, shown: dict[str, Any], heard: Heard | None) -> Result:
        self._result = outcome.result(shown)
        if self._result.state != SUCCEEDED:
            raise JobFailed(self._result, await outcome.tail_or_kept(self._client))
        await self._add_value(shown, heard)
        return self._result

    async def _add_value(self, shown: dict[str, Any], heard: Heard | None) -> None:
        """`shown` is what `show` said of a job whose request is not known here."""
        assert self._result is not None
        request = self._request
        driver = driver_of(shown) if request is None else request.workload.driver
        if driver and driver not in self._client.drivers:
            with contextlib.suppress(NotFound):
                await self.show()
        if self._client.drivers.can(driver).returns_value:
            from moorage.client.handlers import Heard, value_of

            replicas = shown["request"].get("replicas", 1) if request is None else request.replicas
            value = await value_of(self._client, self.id, self._result.changes, heard or Heard(None), replicas)
            self._result = msgspec.structs.replace(self._result, value=value)
        self._valued = True

    async def cancel(self, reason: str = "", by: str = "") -> dict[str, Any]:
        """Cancel at any stage; answered once it is in the ledger. `{"cancelled": …, "was": <state>}`; idempotent.

        The job's transitions keep the reason, and `by` as the name that the caller gave (`Change.said`).
        """
        return await self._client.read("cancel", {"job": self.id, "reason": reason, "by": by})

    async def show(self) -> dict[str, Any]:
        """The whole job: request, replicas, the last transitions; of one long over from its history, as long as that
        is kept (`kept_until_ms`, at the latest). Raises `NotFound`."""
        data = await self._client.read("show", {"job": self.id})
        self._client.drivers.learn(data)
        self.learn(data)
        return data

    async def explain(self) -> dict[str, Any]:
        """Why the job waits: one dominant reason, the counts, its place in the queue. Raises `NotFound`."""
        return await self._client.read("explain", {"job": self.id})

    # -- what others of this room have seen of it

    def saw(self, event: Event) -> None:
        """Keep what an event says of the job as it is now."""
        self.state = event.state
        for change in event.changes:
            if change.state == ACCEPTED and self._began_s is None:
                self._began_s = time.monotonic() - max(time.time() - change.time_ms / 1000, 0)
            self.worker = change.worker or self.worker

    def learn(self, row: dict[str, Any]) -> None:
        """Keep what `show` or `ls` says of the job as it is now."""
        self.state = row["state"]
        self._gpu = row.get("gpu", self._gpu)
        self.worker = row.get("worker", self.worker)
        if "age_ms" in row:
            self._began_s = time.monotonic() - row["age_ms"] / 1000

    def ended(self, result: Result) -> None:
        """It is over, and how; `result` answers at once from now on, but for a handler's value."""
        self.state, self._result = result.state, result

    @property
    def known_result(self) -> Result | None:
        """How it ended where that was seen here; asks nothing and raises nothing."""
        return self._result


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

    def take_all(self, events: Sequence[Event]) -> bool:
        """Take what was said of a job from its first transition on; False where some of that is missing."""
        rev = 0
        for event in events:
            if event.rev > rev:
                changes = event.changes if event.rev - rev == len(event.changes) else behind(rev, event.changes)
                if len(changes) != event.rev - rev:
                    return False
                rev = event.rev
                self._changes += changes
            elif event.rev < rev or event.waiting is None:
                continue  # said twice
            self._state, self._why = event.state, event.why or self._why
        return True

    @property
    def tail(self) -> str:
        """The last lines of the output that came while it was watched."""
        return "\n".join("".join(self._tail)[-TAIL_CHARS_MAX:].splitlines()[-TAIL_LINES:])

    async def tail_or_kept(self, client: AsyncClient) -> str:
        """`tail`, or where nothing was heard, the end of what is kept of the member that decided."""
        last = decided(self._changes, self._state)
        if self._tail or last is None or last.code is None:
            return self.tail
        text = await tail_of(client, self.job, last.replica, last.attempt, TAIL_CHARS_MAX)
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def result(self, shown: dict[str, Any]) -> Result:
        return result_of(self.job, self._state, self._changes, self._why, shown)


def decided(changes: list[Change], state: str) -> Change | None:
    """The transition that made the job's `state` what it is; None where it was not seen.

    Of a gang that failed it is that of the rank that failed first: its last rows have the code of each rank.
    """
    ended = [change for change in changes if change.state == state] if state in TERMINAL else []
    if not ended:
        return None
    exits = (each for each in changes if each.state == EXITED and each.attempt == ended[-1].attempt)
    first = next((change for change in exits if change.code), None) if state == FAILED else None
    return first or next((change for change in ended if change.code), ended[-1])


def result_of(job: str, state: str, changes: list[Change], why: str, shown: dict[str, Any]) -> Result:
    """From what was seen of a job that is over; `shown` has what was not, as `show` or `ls` says it."""
    last = decided(changes, state)
    well = 0 if state == SUCCEEDED else None  # each of a gang's ranks ended so, and the gang itself on no worker
    if last is None:
        code = shown.get("code")
        return Result(job, state, well if code is None else code, shown.get("why", why), changes)
    code = well if last.code is None else last.code
    ended = last.why
    if state == CANCELLED or ended == ENDED_AS_ASKED:  # that its worker did as it was asked says less than who asked
        asked = (CANCELLING,) if state == CANCELLED else (CANCELLING, ENDING)
        ended = next((each.why for each in reversed(changes) if each.state in asked and each.why), ended)
    return Result(job, state, code, ended, changes)
