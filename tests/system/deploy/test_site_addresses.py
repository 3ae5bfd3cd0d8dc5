"""Servers by addresses of both kinds: where they listen, how they are reached, and what their certificates say."""

from __future__ import annotations

import socket

import pytest

from moorage.bus.site import Server, Site, server, url_of
from moorage.cli.fleet.nats_config import _server
from tests.sites import running


@pytest.mark.parametrize(
    ("text", "host", "reached", "listens"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:4222", "127.0.0.1:4222"),
        ("127.0.0.7:14000", "127.0.0.7", "127.0.0.7:14000", "127.0.0.7:14000"),
        ("localhost", "localhost", "localhost:4222", "localhost:4222"),
        ("[::1]", "::1", "[::1]:4222", "[::1]:4222"),
        ("[0:0::1]:14000", "0:0::1", "[0:0::1]:14000", "[0:0::1]:14000"),
        ("[2001:db8::7]", "2001:db8::7", "[2001:db8::7]:4222", "[::]:4222"),
        ("nats_1.example.", "nats_1.example.", "nats_1.example.:4222", "0.0.0.0:4222"),
        ("10.1.2.3:4333", "10.1.2.3", "10.1.2.3:4333", "0.0.0.0:4333"),
    ],
)
def test_a_loopback_address_is_all_that_is_listened_on(text: str, host: str, reached: str, listens: str) -> None:
    found = _server(text)
    assert found.host == host
    assert url_of([found]) == f"nats://{reached}"
    assert f'listen: "{listens}"' in server(Site(tenants=("a",), servers=(found,)), 0, store="/data")


def test_the_routes_of_a_cluster_name_an_address_in_brackets() -> None:
    site = Site(tenants=("a",), servers=tuple(Server("2001:db8::7", 4000 + at) for at in range(3)))
    text = server(site, 0, store="/data", route_password="word")
    assert 'listen: "[::]:6000"' in text
    assert '"nats-route://route:word@[2001:db8::7]:6001"' in text


@pytest.mark.slow
async def test_a_cluster_on_addresses_of_version_6_with_certificates() -> None:
    """It is ready once a client that checks the certificates finds JetStream, whose leader is elected by the routes."""
    assert socket.has_ipv6
    async with (
        running(servers=3, host="::1", auth="mtls") as site,
        await site.connect("ledger.main") as ledger,
    ):
        assert ledger.context.url.startswith("tls://[::1]:")
        assert ledger.is_clustered
