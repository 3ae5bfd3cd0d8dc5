"""How long a request is sent again until it is answered, unless the caller says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: verb of the request ("" for one that is no verb's), and whether the server is one of a cluster: seconds
Patience = Callable[[str, bool], float]

#: what a client of the SDK waits for all other answers
TIMEOUT_S_DEFAULT: Final = 30.0
#: a takeover takes up to 25 s with three servers, and 6 s with one: docs/reliability.md
_CLUSTER_S: Final = 45.0
_ONE_SERVER_S: Final = 15.0
_CHANGES: Final = frozenset({"submit", "cancel"})


def through_takeover(_verb: str, is_clustered: bool) -> float:
    """Return the seconds in which a fleet whose leader was just lost has another one, with room to spare."""
    return _CLUSTER_S if is_clustered else _ONE_SERVER_S


def of_client(verb: str, is_clustered: bool) -> float:
    """Return the seconds of a client of the SDK, which waits through a takeover for what changes something."""
    return max(TIMEOUT_S_DEFAULT, through_takeover(verb, is_clustered) if verb in _CHANGES else 0.0)
