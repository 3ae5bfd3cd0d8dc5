"""One subscription to the tenant's event frames for all jobs that a client follows.

A job's own subject costs the leader and the server a message for every change. It costs this process a subscription,
and a request for earlier events. The leader sends each tick's events to the tenant's subject in any case. A client
therefore subscribes to that subject

- while it follows many jobs or waits for them, and
- while it lingers: for LINGER_S after it began to run a job, or to await the result of one that it submitted. It then
  receives all events of the jobs that it submits next, and needs no request for their results. It does not linger if
  nearly all events are of other clients' jobs.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from moorage.bus.transport import Delivery, Handler, Subscribed
from moorage.client.errors import NotPermitted
from moorage.client.follow.output import Reads
from moorage.client.follow.story import Story
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Answer, Event, Events, ResultLine, Results
from moorage.schemas.subjects import Subjects

#: how long a client stays subscribed after it awaited a result
LINGER_S: Final = 5.0
#: a client stops lingering after OTHERS_FREE events of other clients' jobs, and OTHERS_PER_OWN more for each of its own
OTHERS_PER_OWN: Final = 32
OTHERS_FREE: Final = 5_000
#: after that it does not linger for this long
CROWDED_OUT_S: Final = 60.0
#: most received results that wait for their readers; the oldest are dropped first, and can be read from the bucket
RESULTS_MAX: Final = 4096
#: most transitions that are kept of a submitted job that is not followed yet
HELD_MAX: Final = 64

_decode_results: Final[Decoder[Results]] = Decoder(Results, from_leader=True)
decode_events: Final[Decoder[Events]] = Decoder(Events, from_leader=True)


class Asks(Reads, Protocol):
    """A client that can follow jobs. `AsyncClient` documents the methods."""

    @property
    def tenant(self) -> str: ...

    @property
    def subjects(self) -> Subjects: ...

    async def answer(self, verb: str, arguments: Mapping[str, Any]) -> Answer: ...

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed: ...

    async def subscribe_ahead(self, subject: str, handler: Handler) -> Subscribed: ...


class Listener(Protocol):
    """Follows events. Both methods are called while the connection reads, so they only put the news into a queue."""

    def hear(self, event: Event) -> None: ...

    def refresh(self) -> None:
        """Note that events may have been missed."""


def check_permitted(subscription: Subscribed) -> None:
    """Raise `NotPermitted` if the server has refused this subscription, as far as that is known by now."""
    if subscription.refused is not None:
        raise NotPermitted(subscription.refused.problem)


class Feed:
    """The subscription to the tenant's events: it exists while there is a listener, and while the client lingers."""

    def __init__(self, asks: Asks) -> None:
        self._asks = asks
        self._subject = asks.subjects.events(asks.tenant)
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[str, list[Listener]] = {}
        self._expected: weakref.WeakValueDictionary[str, Story] = weakref.WeakValueDictionary()
        self._subscription: Subscribed | None = None
        #: by name: small results of jobs that are followed here, from the subject for all results of the tenant
        self.results: dict[str, ResultLine] = {}
        self._results: Subscribed | None = None
        self._changing = asyncio.Lock()  # one task subscribes or unsubscribes at a time
        self._lingers_until_s = 0.0
        self._lingers_not_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._own = self._others = 0  # events since the client began to linger

    # -- listeners

    async def join(self, jobs: Iterable[str], listener: Listener) -> None:
        """Call `listener` with each event of these jobs from now on.

        Raises `NotPermitted`. If the client lingers, `check_permitted` raises it instead, once a request was answered.
        """
        names = list(jobs)
        for job in names:
            self._listeners.setdefault(job, []).append(listener)
        if self._subscription is not None:
            return
        try:
            async with self._changing:
                if self._subscription is None:
                    self._subscription = await self._asks.subscribe(self._subject, self._on_frame)
        except BaseException:
            self._remove(names, listener)
            raise

    async def leave(self, jobs: Iterable[str], listener: Listener) -> None:
        """Undo `join` with the same arguments. Without listeners the subscription ends, unless the client lingers."""
        self._remove(jobs, listener)
        if not self._listeners and not self._lingers_until_s:
            await self._end()

    def _remove(self, jobs: Iterable[str], listener: Listener) -> None:
        for job in jobs:
            of_job = self._listeners[job]
            of_job.remove(listener)
            if not of_job:
                del self._listeners[job]

    @property
    def is_refused(self) -> bool:
        """Whether the server refused the subscription, as far as that is known."""
        return self._subscription is not None and self._subscription.refused is not None

    def check_permitted(self) -> None:
        """Raise `NotPermitted` if the server has refused the subscription, as far as that is known."""
        if self._subscription is not None:
            check_permitted(self._subscription)

    # -- lingering

    @property
    def lingers(self) -> bool:
        """Whether the client receives all events of jobs that it submits now."""
        return bool(self._lingers_until_s) and self._subscription is not None and not self.is_refused

    @property
    def has_results(self) -> bool:
        """Whether the client receives small results of jobs that it submits now."""
        return self.lingers and self._results is not None and self._results.refused is None

    async def linger(self, *, results: bool = False) -> None:
        """Stay subscribed for the next LINGER_S; with `results`, also to the results of handlers.

        Does nothing if the server refused the subscription, or for CROWDED_OUT_S if too many events were of other
        clients' jobs. The server subscribes the client before it handles what the client sends next.
        """
        now_s = self._loop.time()
        if self.is_refused:
            self._lingers_not_until_s = math.inf
        if now_s < self._lingers_not_until_s:
            return
        self._lingers_until_s = now_s + LINGER_S
        if self._timer is None:
            self._own = self._others = 0
            self._timer = self._loop.call_at(self._lingers_until_s, self._end_lingering)
        if self._subscription is None:
            async with self._changing:
                if self._subscription is None:
                    self._subscription = await self._asks.subscribe_ahead(self._subject, self._on_frame)
        if results and self._results is None:
            async with self._changing:
                if self._results is None:
                    subject = self._asks.subjects.results(self._asks.tenant)
                    self._results = await self._asks.subscribe_ahead(subject, self._on_results)

    def expect(self, job: str) -> Story | None:
        """Return the story of a job that is submitted next. Events are merged into it while the caller references it.

        None if the client does not linger.
        """
        if not self.lingers:
            return None
        if (before := self._expected.get(job)) is not None:  # submitted twice: events go to the new story from now on
            before.is_stale = True
        story = self._expected[job] = Story(job)
        return story

    def is_followed(self, story: Story) -> None:
        """Stop merging events into this story: a listener does it from now on."""
        if self._expected.get(story.job) is story:
            del self._expected[story.job]

    def refresh(self) -> None:
        """Mark the stories of jobs that are not followed yet as stale: events may have been missed."""
        for story in self._expected.values():
            story.is_stale = True

    def close(self) -> None:
        """End the timer, and mark expected stories as stale. The client is closed, and its subscriptions with it."""
        if self._timer is not None:
            self._timer.cancel()
        self.refresh()

    def _end_lingering(self) -> None:
        """Stop lingering, unless `linger` was called meanwhile. Unsubscribe if there are no listeners."""
        self._timer = None
        if self._loop.time() < self._lingers_until_s:
            self._timer = self._loop.call_at(self._lingers_until_s, self._end_lingering)
            return
        self._lingers_until_s = 0.0
        self.refresh()
        self._expected.clear()
        if not self._listeners or self._results is not None:
            self._ending = self._loop.create_task(self._end())

    async def _end(self) -> None:
        async with self._changing:
            subscription, results = self._subscription, self._results
            if results is not None and not self._lingers_until_s:
                self._results = None
                self.results.clear()
                await results.unsubscribe()
            if subscription is not None and not self._listeners and not self._lingers_until_s:
                self._subscription = None
                await subscription.unsubscribe()

    # -- what comes in

    def _on_results(self, delivery: Delivery) -> None:
        try:
            lines = _decode_results(delivery.data).results
        except Refused:
            return  # the results can be read from the bucket
        for line in lines:
            job = line.result.partition(".")[0]
            if job in self._listeners or job in self._expected:
                self.results[line.result] = line
            else:
                self._others += 1
        while len(self.results) > RESULTS_MAX:
            del self.results[next(iter(self.results))]

    def _on_frame(self, delivery: Delivery) -> None:
        listeners, expected = self._listeners, self._expected
        try:
            events = decode_events(delivery.data).jobs
        except Refused:
            self.refresh()
            for listener in {listener for of_job in listeners.values() for listener in of_job}:
                listener.refresh()
            return
        own = 0
        for event in events:
            name = event.job
            following, story = listeners.get(name), expected.get(name)
            if following is not None:
                for listener in following:
                    listener.hear(event)
            if story is not None:  # even if the job is followed: its result is taken from this story
                if len(story.changes) < HELD_MAX:
                    story.take(event)
                else:
                    story.is_stale = True
            own += following is not None or story is not None
        self._own += own
        self._others += len(events) - own
        if self._timer is not None and self._others > OTHERS_FREE + OTHERS_PER_OWN * self._own:
            self._timer.cancel()
            self._lingers_until_s, self._lingers_not_until_s = 0.0, self._loop.time() + CROWDED_OUT_S
            self._end_lingering()
