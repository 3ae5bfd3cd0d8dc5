"""The link of a leaf node to its site's server, which a test cuts: in a network namespace of its own, where that may be
made, else through a proxy on loopback. While it is cut, nothing passes and nobody is told."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from moorage.bus.embedded import find_binary
from moorage.bus.site import LEAVES_BEHIND, Server
from tests.release.chaos.proxy import Proxy
from tests.sites import HOST, free_servers

_BLOCK: Final = "10.213"


class LeafLink:
    """`hub` is where the site's server is to listen, `leaf` where the leaf node is."""

    def __init__(self, hub: Server, leaf: Server) -> None:
        self.hub = hub
        self.leaf = leaf

    def argv(self, configuration: Path) -> list[str]:
        """Return the command that runs the leaf node by this file."""
        return [find_binary(), "-c", str(configuration)]

    def cut(self) -> None: ...

    def heal(self) -> None: ...


class _Namespace(LeafLink):
    """Two cables lead there: one for the servers, which is cut, and one for those who play the machines of that
    place."""

    def __init__(self) -> None:
        self._name = f"mrg{secrets.token_hex(3)}"
        net = f"{_BLOCK}.{secrets.randbelow(256)}"
        at = 8 * secrets.randbelow(32)
        hub, leaf = free_servers(2)
        super().__init__(Server(f"{net}.{at + 1}", hub.port), Server(f"{net}.{at + 6}", leaf.port))
        self._cables = [(f"{self._name}a", at + 1), (f"{self._name}b", at + 5)]
        self._net = net

    def __enter__(self) -> _Namespace:
        _ip("netns", "add", self._name)
        for cable, address in self._cables:
            _ip("link", "add", cable, "type", "veth", "peer", "name", "far", "netns", self._name)
            _ip("-n", self._name, "link", "set", "far", "name", f"far{address}")
            _ip("addr", "add", f"{self._net}.{address}/30", "dev", cable)
            _ip("-n", self._name, "addr", "add", f"{self._net}.{address + 1}/30", "dev", f"far{address}")
            _ip("link", "set", cable, "up")
            _ip("-n", self._name, "link", "set", f"far{address}", "up")
        return self

    def __exit__(self, *_: object) -> None:
        _ip("netns", "del", self._name)
        for cable, _address in self._cables:  # they end with the namespace, once its last process has
            subprocess.run(["ip", "link", "del", cable], capture_output=True, check=False)

    def argv(self, configuration: Path) -> list[str]:
        return ["ip", "netns", "exec", self._name, *super().argv(configuration)]

    def cut(self) -> None:
        _ip("link", "set", self._cables[0][0], "down")

    def heal(self) -> None:
        _ip("link", "set", self._cables[0][0], "up")


class _Proxied(LeafLink):
    def __init__(self) -> None:
        hub, leaf = free_servers(2)
        super().__init__(hub, leaf)
        self.proxy = Proxy(hub.port + LEAVES_BEHIND)

    def argv(self, configuration: Path) -> list[str]:
        text = configuration.read_text()
        configuration.write_text(text.replace(f"{HOST}:{self.hub.port + LEAVES_BEHIND}", f"{HOST}:{self.proxy.port}"))
        return super().argv(configuration)

    def cut(self) -> None:
        self.proxy.cut()

    def heal(self) -> None:
        self.proxy.heal()


@contextlib.asynccontextmanager
async def link() -> AsyncIterator[LeafLink]:
    if may_make_namespaces():
        with _Namespace() as made:
            yield made
        return
    proxied = _Proxied()
    await proxied.proxy.open()
    try:
        yield proxied
    finally:
        await proxied.proxy.close()


@contextlib.contextmanager
def leaf_node(link: LeafLink, folder: Path) -> Iterator[Path]:
    """The leaf node by the files of this folder; its log."""
    log = folder / "leaf.log"
    with log.open("ab") as out:
        process = subprocess.Popen(link.argv(folder / "server.conf"), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield log
    finally:
        process.terminate()
        process.wait()


def may_make_namespaces() -> bool:
    if os.geteuid():
        return False
    name = f"mrg{secrets.token_hex(3)}"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
            return True
        finally:
            _ip("netns", "del", name)
    return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
