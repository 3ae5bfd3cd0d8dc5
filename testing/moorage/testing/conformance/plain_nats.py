"""nats-py with its own reconnect, as a service in another program has it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from nats.aio.client import Client

log = logging.getLogger(__name__)


async def connect(servers: str | Sequence[str], **options: Any) -> Client:
    """As `nats.connect`, for a test whose server goes away and comes back.

    nats-py 2.16 leaves the socket of each reconnect whose handshake fails to the garbage collector; the warning of that
    then fails whatever test is running. So it is closed here.
    """
    client = Client()

    async def on_error(error: Exception) -> None:
        log.info("nats-py: %r", error)
        transport: Any = client._transport
        if not client.is_connected and transport is not None:
            transport.close()

    await client.connect(servers if isinstance(servers, str) else list(servers), error_cb=on_error, **options)
    return client
