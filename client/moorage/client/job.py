"""A handle on one job, which needs nothing but its id: follow it, wait for it, ask about it, end it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moorage.client.durations import Duration, age, seconds
from moorage.client.errors import JobFailed, NotFound
from moorage.client.follow.captured import Tail
from moorage.client.follow.output import Joiner, Piece, newest_attempts, read_page
from moorage.client.follow.result import Result
from moorage.client.follow.seen import Seen
from moorage.client.follow.stories import Following
from moorage.client.follow.watch import Watch
from moorage.client.steps import Step, step_of
from moorage.schemas.capabilities import driver_of
from moorage.schemas.frames import Accepted, Event
from moorage.schemas.gpu import format_token
from moorage.schemas.job import SUCCEEDED

if TYPE_CHECKING:
    from moorage.client.connected import Connected
    from moorage.client.follow.story import Story
    from moorage.client.handlers import Heard, OnProgress
    from moorage.schemas.job import Request


class Job(Seen):
    """Made by `AsyncClient.submit` and `AsyncClient.job`; needs no memory of the submit.

    `accepted` is the scheduler's answer if this handle came from a submit. `state`, `gpu` (the token of what the job
    asks for) and `worker` are as last seen here.
    """

    __slots__ = ("_client", "_request", "_story", "_valued", "accepted")

    def __init__(
        self,
        client: Connected,
        id: str,
        accepted: Accepted | None = None,
        request: Request | None = None,
        story: Story | None = None,
    ) -> None:
        is_new = accepted is not None and not accepted.duplicate
        super().__init__(id, accepted.state if accepted is not None else "", time.monotonic() if is_new else None)
        self.accepted = accepted
        self._request = request
        self._story = story if is_new else None
        self._valued = False
        self._client = client

    def __repr__(self) -> str:
        words = [self.id, "of", self._client.tenant, self.state or "not asked yet", self.gpu]
        if self.worker:
            words.append(f"on {self.worker}")
        if self._began_s is not None:
            words.append(f"accepted {age((time.monotonic() - self._began_s) * 1000)} ago")
        return f"<Job {' '.join(filter(None, words))}>"

    @property
    def tenant(self) -> str:
        """The job's tenant: that of the client that made this handle."""
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
        week by default). Events without a transition tell why the job waits, if this client follows fewer than 16
        jobs. `timeout` bounds the whole iteration. Raises `NotFound`, `NoScheduler`, `NotPermitted`, `TimedOut`.
        """
        async with Watch(Following(self._client._stories, self.id, ahead=True, saw=self._saw)) as watch:
            async for item in watch.follow(None if timeout is None else seconds(timeout)):
                if isinstance(item, Event):
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
            following = Following(self._client._stories, self.id, ahead=True, saw=self._saw)
            async with Watch(following, past=True, tail=tail, replica=replica) as watch:
                async for item in watch.follow(None if timeout is None else seconds(timeout)):
                    if isinstance(item, Piece):
                        given += 1
                        yield item
            joiner = watch.joiner
        else:
            joiner = Joiner(self._client, self.id, tail)
            newest = newest_attempts(await self.show())
            async for piece in joiner.kept_of(newest, replica, attempt):
                given += 1
                yield piece
        if joiner is not None and joiner.trouble is not None and not given:
            raise joiner.trouble

    async def ports(self, replica: int = 0) -> dict[int, str]:
        """Return where a running container of the job is reached, `address:port` by its own ports, as its worker says.

        Empty where it publishes none, or does not run. Raises `NoOutput`, `NotFound`, `NoScheduler`.
        """
        page = await read_page(self._client, self.id, replica, None, "out", 0, 1)
        return {int(own): where for own, where in page.ports.items()}

    async def result(self, timeout: Duration | None = None, on_progress: OnProgress | None = None) -> Result:
        """Wait until the job is over. `timeout` defaults to the client's `wait_timeout`.

        The result of a handler's job has the `value` that the function returned, read from the tenant's bucket if it is
        large or was not heard; `on_progress` is called with each `Progress` that is heard meanwhile. Raises `JobFailed`
        unless the job SUCCEEDED, `TimedOut` (the job goes on), `NotFound`, `NoScheduler`.
        """
        timeout_s = self._client.wait_timeout_s if timeout is None else seconds(timeout)
        if self._result is None:
            return await self._followed_to_its_end(timeout_s, on_progress)
        if self._result.state != SUCCEEDED:
            raise JobFailed(self._result, request=self._request)
        if not self._valued:
            await self._add_value({} if self._request is not None else await self.show(), None)
        return self._result

    async def _followed_to_its_end(self, timeout_s: float, on_progress: OnProgress | None) -> Result:
        stories, request, tail = self._client._stories, self._request, Tail()
        heard, self._story = self._story, None
        driver = "" if request is None else request.workload.driver
        can = stories.drivers.can(driver)  # output that its worker keeps is asked for only of jobs that failed
        output = not can.keeps_output
        if can.returns_value:  # its result is sent to all that wait for some, with the end of what a failed one wrote
            output = on_progress is not None or heard is None or not stories.feed.has_results
        if request is not None:  # the caller is likely to await the result of the next job of its own as well
            await stories.feed.linger(results=can.returns_value)
        following = Following(
            stories, self.id, heard=heard, driver=driver, ahead=True, at_end=not output, saw=self._saw
        )
        progress: Heard | None = None
        async with Watch(following, output=output) as watch:
            if not output:
                await following.begin(timeout_s)
                await following.over()
            else:
                async for item in watch.follow(timeout_s):
                    if isinstance(item, Piece):
                        tail.take(item)
                        if stories.drivers.can(watch.driver).returns_value:
                            progress = progress or _heard_by(on_progress)
                            progress.take(item)
                    elif item.state == SUCCEEDED:
                        break  # the end of its output is for those that failed
        self._result = watch.result()
        if self._result.state != SUCCEEDED:
            if can.returns_value and not output:
                tail.take_of(stories.feed.results, self._result)
            asked = following.shown.get("request") if request is None else request
            raise JobFailed(self._result, await tail.or_kept(self._client, self._result), asked)
        await self._add_value(following.shown, progress)
        return self._result

    async def _add_value(self, shown: dict[str, Any], heard: Heard | None) -> None:
        """Set the result's value, if the driver returns one. `shown`: what `show` answers on an unknown request."""
        assert self._result is not None
        request = self._request
        driver = driver_of(shown) if request is None else request.workload.driver
        if driver and driver not in self._client._stories.drivers:
            with contextlib.suppress(NotFound):
                await self.show()
        if self._client._stories.drivers.can(driver).returns_value:
            from moorage.client.handlers import value_of

            replicas = shown["request"].get("replicas", 1) if request is None else request.replicas
            value = await value_of(self._client, self.id, self._result.changes, heard or _heard_by(None), replicas)
            self._result = msgspec.structs.replace(self._result, value=value)
        self._valued = True

    async def cancel(self, reason: str = "", by: str = "") -> dict[str, Any]:
        """Cancel at any stage; answered once it is in the ledger. `{"cancelled": …, "was": <state>}`; idempotent.

        The job's transitions keep the reason, and `by` as the name that the caller gave (`Change.said`).
        """
        return await self._client.read("cancel", {"job": self.id, "reason": reason, "by": by})

    async def files(self, into: str | os.PathLike[str], path: str = "", *, replica: int | None = None) -> list[Path]:
        """Fetch the files that the job kept (`keep` of its request) into a new folder, and return their paths.

        `path` chooses a file or folder of the job's folder. Of a job with several replicas each has a folder of its
        own, called by its number, unless `replica` chooses one. They are there once the job has SUCCEEDED, as a rule
        also where it failed or was cancelled, for some days. Raises `NotFound` where nothing is kept, and `Rejected`
        where `into` is there and not empty.
        """
        from moorage.client.kept_files import fetch

        return await fetch(self._client, self.id, into, replica, path)

    async def show(self) -> dict[str, Any]:
        """The whole job: request, replicas, the last transitions; of one long over from its history, as long as that
        is kept (`kept_until_ms`, at the latest). Raises `NotFound`."""
        data = await self._client.read("show", {"job": self.id})
        self._client._stories.drivers.learn(data)
        self._learn(data)
        return data

    async def explain(self) -> dict[str, Any]:
        """Return why the job waits: one dominant reason, the counts, its place in the queue. Raises `NotFound`."""
        return await self._client.read("explain", {"job": self.id})


def _heard_by(on_progress: OnProgress | None) -> Heard:
    from moorage.client.handlers import Heard  # what a worker is made of: most jobs are no functions

    return Heard(on_progress)
