"""A server in a container, through a real scheduler, agent and podman: it is reached where `show` says."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.podmans import podman_home, why_no_podman
from tests.servers import Server
from tests.system.live.stack import QUICK, caller, stack, unique_prefix
from tests.waiting import until

IMAGE: Final = "moorage-test:server"
ANSWER_S: Final = 90.0
#: answers in HTTP on its first port, with the port and the attempt, from the moment at which a caller lets it
SERVER: Final = """
echo "$MOORAGE_ATTEMPT $PORT $PORT_1" > index.html
until test -e open; do busybox sleep 0.05; done
exec busybox httpd -f -p $PORT
"""


def asked(address: str) -> str:
    host, _, ports = address.rpartition(":")
    with urlopen(f"http://{host}:{ports.partition(',')[0]}/index.html", timeout=ANSWER_S) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
async def test_a_server_in_a_container_is_ready_and_reached_where_show_says(nats_server: Server) -> None:
    if why := why_no_podman():
        pytest.skip(why)
    with podman_home() as home:
        home.make_image(IMAGE, "busybox")
        own = {"SOCKET": str(home.socket), "PULL": "never", "NETWORK": "bridge"}
        environment = {f"MOORAGE_DRIVER_PODMAN_{key}": value for key, value in own.items()}
        async with stack(nats_server, unique_prefix()) as made, caller(made) as asking:
            await made.scheduler(config=QUICK)
            await made.agent("w", "1xT4", drivers=["podman"], address="127.0.0.1", environment=environment)
            await asking.leader()
            ready = {"http": "PORT/index.html", "every_s": 1}
            run = {"driver": "podman", "image": IMAGE, "ports": 2, "ready": ready}
            await asking.submit("server", "busybox", "sh", "-c", SERVER, run=run)
            await asking.reaches("server", "RUNNING")
            [row] = (await asking.show("server"))["replica_states"]
            first, second = row["address"].removeprefix("127.0.0.1:").split(",")
            assert (row.get("ready", False), first.isdecimal(), first != second) == (False, True, True)
            with pytest.raises((URLError, ConnectionError)):
                await asyncio.to_thread(asked, row["address"])

            [container] = home.containers()
            home.podman("exec", container, "busybox", "touch", "open")

            async def is_ready() -> bool:
                return bool((await asking.show("server"))["replica_states"][0].get("ready"))

            await until(is_ready, ANSWER_S, "it is ready")
            assert await asyncio.to_thread(asked, row["address"]) == f"1 {first} {second}\n"
            await asking.api("cancel", {"job": "server"})
            await asking.reaches("server", "CANCELLED")
            with pytest.raises((URLError, ConnectionError)):
                await asyncio.to_thread(asked, row["address"])
