"""The fleets of the live screen: each with its client and its feed, and what is wrong while it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from moorage.cli.framework.options import Options, client_of
from moorage.cli.top.feed import ROUND_S, Feed
from moorage.schemas.errors import MoorageError

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.view.view import View


class Watched:
    """One fleet, whose client is connected and whose feed is open; its name is "" if it is the only one."""

    def __init__(self, client: AsyncClient | None, feed: Feed | None, name: str = "") -> None:
        self.name = name
        self.client = client
        self.feed = feed
        self.trouble = ""  # why it does not answer

    async def keep_asking(self, on_trouble: Callable[[MoorageError], None]) -> None:
        """Follow the fleet for ever."""
        assert self.feed is not None
        await self.feed.keep_asking(on_trouble)

    def told(self) -> View | str:
        """Return what is seen of it, or why nothing is."""
        if self.feed is None or self.feed.is_troubled:
            return self.trouble or "connecting"
        return self.feed.view()


class OneOfSeveral(Watched):
    """A fleet that is connected to by these options, again and again: the screen goes on without it."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(None, None, name)
        self._options = options

    async def keep_asking(self, on_trouble: Callable[[MoorageError], None]) -> None:
        while True:
            try:
                async with client_of(self._options) as client:
                    feed = Feed(client)
                    await feed.open()
                    self.client, self.feed = client, feed
                    await feed.keep_asking(self._failed)
            except MoorageError as error:
                self.client = self.feed = None
                self._failed(error)
            await asyncio.sleep(ROUND_S)

    def _failed(self, error: MoorageError) -> None:
        self.trouble = error.problem.message
