"""Of a cluster whose servers tell of each other: one address in a URL reaches the others, as who the URL says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final
from urllib.parse import quote

from moorage.bus.connection import connect
from moorage.bus.embedded import HOST, find_binary
from moorage.bus.errors import BusError
from tests.leftover import ends_with_the_test
from tests.ports import free_ports
from tests.waiting import until

#: as a generator of passwords makes them: what has a meaning in a URL is escaped in it
PASSWORD: Final = "w0rd/with#much?in,it@100%"


async def test_who_knows_one_server_is_let_in_by_the_others_when_it_dies(tmp_path: Path) -> None:
    """Also by one that came only after the connection."""
    clients, routes = (ports := free_ports(4))[:2], ports[2:]

    async def start(at: int) -> asyncio.subprocess.Process:
        conf, other = tmp_path / f"{at}.conf", f"nats-route://{HOST}:{routes[1 - at]}"
        conf.write_text(
            f'server_name: "n{at}"\nlisten: "{HOST}:{clients[at]}"\n'
            f'authorization {{ user: "me", password: "{PASSWORD}" }}\n'
            f'cluster {{ name: "c", listen: "{HOST}:{routes[at]}", routes: ["{other}"] }}\n'
        )
        return ends_with_the_test(
            await asyncio.create_subprocess_exec(find_binary(), "-c", str(conf), stderr=asyncio.subprocess.DEVNULL)
        )

    first = await start(0)
    told: list[BusError] = []
    url = f"nats://me:{quote(PASSWORD, safe='')}@{HOST}:{clients[0]}"
    found = await connect(url, "test", on_error=told.append)
    try:
        assert found.is_clustered, "it is one of two, though alone so far"
        assert found._client.discovered_servers == []
        await start(1)
        await until(lambda: any(uri.port == clients[1] for uri in found._client.discovered_servers))
        first.kill()
        await until(lambda: found.reconnects)
        assert found.is_connected
        await found.flush()
        assert told == []
    finally:
        await found.close()
