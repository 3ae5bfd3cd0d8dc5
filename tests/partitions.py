"""Hosts of their own on one bridge, each in a network namespace, whose cables are pulled and put back."""

from __future__ import annotations

import secrets
import subprocess
from typing import Final, Self

HOSTS: Final = 3


class Hosts:
    """`addresses` of the hosts, from 0; the machine of the test is on their network, too."""

    def __init__(self, count: int = HOSTS) -> None:
        self._tag = secrets.token_hex(3)
        net = f"10.{200 + secrets.randbelow(13)}.{secrets.randbelow(256)}"
        self._own = f"{net}.1/24"
        self.addresses = [f"{net}.{number + 11}" for number in range(count)]

    def __enter__(self) -> Self:
        bridge = f"b{self._tag}"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", self._own, "dev", bridge)
        _ip("link", "set", bridge, "up")
        for at, address in enumerate(self.addresses):
            host = self._host(at)
            _ip("netns", "add", host)
            _ip("link", "add", self._cable(at), "type", "veth", "peer", "name", "eth", "netns", host)
            _ip("link", "set", self._cable(at), "master", bridge)
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth")
            for device in ("eth", "lo"):
                _ip("-n", host, "link", "set", device, "up")
            self.heal(at)
        return self

    def __exit__(self, *_: object) -> None:
        for at in range(len(self.addresses)):
            _ip("netns", "del", self._host(at))
        _ip("link", "del", f"b{self._tag}")

    def argv(self, at: int, *argv: str) -> list[str]:
        """Return the command that runs this one on a host."""
        return ["ip", "netns", "exec", self._host(at), *argv]

    def cut(self, at: int) -> None:
        """Nothing passes to or from this host, and nobody is told."""
        _ip("link", "set", self._cable(at), "down")

    def heal(self, at: int) -> None:
        _ip("link", "set", self._cable(at), "up")

    def _host(self, at: int) -> str:
        return f"h{self._tag}{at}"

    def _cable(self, at: int) -> str:
        return f"c{self._tag}{at}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
