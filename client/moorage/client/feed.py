"""One subscription to the tenant's event frames for all that a client follows.

A job's own subject costs the leader and the server a message for every change, and this process a subscription and a
question for what was before. The tenant's frame of each tick is sent anyway. So a client listens to that

- while it follows many jobs (`CROWD`), or
- while it stands: for some seconds after it ran a job, or awaited the result of one of its own. It then hears its
  next jobs from their beginning (`Beginning`), so that their results need no question. It does not stand where nearly
  all that it would hear is of others' jobs.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from moorage.bus.transport import Delivery, Subscribed
from moorage.client.beginning import Beginning, Hear
from moorage.client.errors import NotPermitted
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Events

if TYPE_CHECKING:
    from moorage.client.connected import Connected

#: with so many watches open on a client, further ones listen to the tenant's frames together
CROWD: Final = 16
#: how long a client stands after it awaited a result
STANDS_S: Final = 5.0
#: so many events of others' jobs for each of its own are worth hearing (2 µs each), and so many without any
OTHERS_PER_OWN: Final = 32
OTHERS_FREE: Final = 5_000
#: it does not stand for so long after it heard more than that
CROWDED_OUT_S: Final = 60.0

decode_events: Final[Decoder[Events]] = Decoder(Events, from_leader=True)

Refresh = Callable[[], None]


def check_permitted(subscription: Subscribed) -> None:
    """Raises `NotPermitted` where the server has refused it, as far as is known from what was answered."""
    if subscription.refused is not None:
        raise NotPermitted(subscription.refused.problem)


class Feed:
    """Subscribed while anybody listens, and while it stands."""

    def __init__(self, client: Connected) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[str, list[tuple[Hear, Refresh]]] = {}
        self._beginnings: weakref.WeakValueDictionary[str, Beginning] = weakref.WeakValueDictionary()
        self._subscription: Subscribed | None = None
        self._changing = asyncio.Lock()  # one subscribes or leaves at a time
        self._stands_until_s = 0.0
        self._stands_not_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._own = self._others = 0  # events since it stands

    # -- following one job of many

    async def join(self, job: str, hear: Hear, refresh: Refresh) -> None:
        """From now on call `hear` with each event of `job`, and `refresh` when a frame cannot be decoded.

        Both run in the read path and may only enqueue. Raises `NotPermitted`, also in `check_permitted` later.
        """
        self._listeners.setdefault(job, []).append((hear, refresh))
        if self._subscription is not None:
            return
        try:
            async with self._changing:
                if self._subscription is None:
                    self._subscription = await self._client.subscribe(self._subject, self._on_frame)
        except BaseException:
            self._remove(job, hear, refresh)
            raise

    async def leave(self, job: str, hear: Hear, refresh: Refresh) -> None:
        """Undo a `join` with the same arguments; the last one ends the subscription, unless it stands."""
        self._remove(job, hear, refresh)
        if not self._listeners and not self._stands_until_s:
            await self._end()

    def attend(self, job: str, beginning: Beginning) -> None:
        """As `join`, for what is heard already."""
        self._listeners.setdefault(job, []).append((beginning.hear, beginning.refresh))

    def dismiss(self, job: str, beginning: Beginning) -> None:
        """Undo `attend`."""
        self._remove(job, beginning.hear, beginning.refresh)
        if not self._listeners and not self._stands_until_s:
            self._ending = self._loop.create_task(self._end())

    def _remove(self, job: str, hear: Hear, refresh: Refresh) -> None:
        of_job = self._listeners[job]
        of_job.remove((hear, refresh))
        if not of_job:
            del self._listeners[job]

    @property
    def stands(self) -> bool:
        """Whether jobs that are submitted now are heard from their beginning."""
        subscription = self._subscription
        return bool(self._stands_until_s) and subscription is not None and subscription.refused is None

    @property
    def is_refused(self) -> bool:
        """Whether the server does not let this tenant's frames be heard here."""
        return self._subscription is not None and self._subscription.refused is not None

    def check_permitted(self) -> None:
        """Raises `NotPermitted` where that is so, as far as is known from what was answered."""
        if self._subscription is not None:
            check_permitted(self._subscription)

    # -- standing

    def stands_on(self) -> bool:
        """As `stand`, where there is nothing to do for that; else False."""
        if self._timer is None or self._subscription is None or self._subscription.refused is not None:
            return False
        self._stands_until_s = self._loop.time() + STANDS_S
        return True

    async def stand(self) -> None:
        """Stand from now on for STANDS_S; the server knows before whatever is sent next."""
        now_s = self._loop.time()
        if self.is_refused:
            self._stands_not_until_s = math.inf
        if now_s < self._stands_not_until_s:
            return
        self._stands_until_s = now_s + STANDS_S
        if self._timer is None:
            self._own = self._others = 0
            self._timer = self._loop.call_at(self._stands_until_s, self._look)
        if self._subscription is None:
            async with self._changing:
                if self._subscription is None:
                    self._subscription = await self._client.subscribe_ahead(self._subject, self._on_frame)

    def expect(self, job: str) -> Beginning | None:
        """To be called before `job` is submitted: what is heard of it is gathered as long as the answer is held.

        None where this does not stand.
        """
        if not self.stands:
            return None
        beginning = self._beginnings[job] = Beginning()
        return beginning

    def refresh(self) -> None:
        """The connection was lost and is back."""
        for beginning in self._beginnings.values():
            beginning.refresh()

    def close(self) -> None:
        """The client is closed, and its subscriptions with it."""
        if self._timer is not None:
            self._timer.cancel()
        self.refresh()

    def _look(self) -> None:
        """Go on standing, or end."""
        self._timer = None
        if self._loop.time() < self._stands_until_s:
            self._timer = self._loop.call_at(self._stands_until_s, self._look)
            return
        self._stands_until_s = 0.0
        for beginning in self._beginnings.values():
            beginning.drop()
        if not self._listeners:
            self._ending = self._loop.create_task(self._end())

    async def _end(self) -> None:
        async with self._changing:
            subscription = self._subscription
            if subscription is not None and not self._listeners and not self._stands_until_s:
                self._subscription = None
                await subscription.unsubscribe()

    # -- what comes in

    @property
    def _subject(self) -> str:
        return self._client.subjects.events(self._client.tenant)

    def _on_frame(self, delivery: Delivery) -> None:
        listeners, beginnings = self._listeners, self._beginnings
        try:
            events = decode_events(delivery.data).jobs
        except Refused:
            self.refresh()
            for of_job in listeners.values():
                for _, refresh in of_job:
                    refresh()
            return
        own = 0
        for event in events:
            name = event.job
            following, beginning = listeners.get(name), beginnings.get(name)
            if following is not None:
                for hear, _ in following:
                    hear(event)
            if beginning is not None and not beginning.is_awaited:  # while it is awaited it hears as a listener
                beginning.hear(event)  # also of a job that is followed: its result is taken from here
            own += following is not None or beginning is not None
        self._own += own
        self._others += len(events) - own
        if self._timer is not None and self._others > OTHERS_FREE + OTHERS_PER_OWN * self._own:
            self._timer.cancel()
            self._stands_until_s, self._stands_not_until_s = 0.0, self._loop.time() + CROWDED_OUT_S
            self._look()
