"""The names of nats-servers that are leaf nodes: by its server's name a client learns that it is behind one."""

from __future__ import annotations

from typing import Final

_HEAD: Final = "moorage-leaf-"


def leaf_name(place: str) -> str:
    """Return the name of the server that is the leaf node of a place."""
    return f"{_HEAD}{place}"


def leaf_of(server_name: str) -> str:
    """Return the place whose leaf node the server of this name is; "" for any other server."""
    return server_name.removeprefix(_HEAD) if server_name.startswith(_HEAD) else ""
