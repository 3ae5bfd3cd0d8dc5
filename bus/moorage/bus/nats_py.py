"""Import nats-py, here alone, and without aiohttp, which nats-py loads wherever aiohttp is installed.

nats-py uses aiohttp for web sockets alone, and aiohttp takes longer to import than all of nats-py: every command, agent
and scheduler of a site that runs containers would pay for it. `load_web_sockets` imports it where a URL asks for one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import threading
from typing import Any, Final

LATE: Final = ("aiohttp", "multidict")


class _Late(importlib.abc.MetaPathFinder):
    """Hides modules from imports of this thread alone, so that they are imported only when they are needed."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in LATE and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is imported with the first web socket", name=fullname)


_late = _Late()
sys.meta_path.insert(0, _late)
try:
    import nats
    import nats.aio.transport
    import nats.errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.aio.transport import TcpTransport
    from nats.protocol.command import sub_cmd, unsub_cmd
    from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser
finally:
    sys.meta_path.remove(_late)

__all__ = [
    "AWAITING_CONTROL_LINE",
    "Client",
    "Msg",
    "Parser",
    "Subscription",
    "TcpTransport",
    "load_web_sockets",
    "nats",
    "sub_cmd",
    "unsub_cmd",
]


def load_web_sockets() -> None:
    """Import aiohttp, so that nats-py can connect to ws:// and wss://. If it is not installed, nats-py says so."""
    transport: Any = nats.aio.transport
    for name in LATE:
        try:
            setattr(transport, name, importlib.import_module(name))
        except ImportError:
            return
