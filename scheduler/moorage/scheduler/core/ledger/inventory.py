"""What a worker has, by its recorded hello: read once, where its join is folded, and from a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from moorage.schemas.frames import Hello
from moorage.schemas.frames.fleet import LOAD_S_DEFAULT


class Inventory(Hello, frozen=True, gc=False, omit_defaults=True):
    """A recorded hello with what the scheduler adds. All fields have defaults and no bounds, as it was checked once."""

    worker: str = ""
    boot: str = ""
    load_s: float = LOAD_S_DEFAULT
    lease_s: float = 0.0
    lost_ms: int = 0  # the silence after which the worker is lost, as sent with its join; 0: not recorded
    json: bool = False  # whether it joined in JSON, not msgpack


#: of a worker that has not joined yet
NO_INVENTORY: Final = Inventory()


def inventory_in(hello: Mapping[str, Any]) -> Inventory:
    """Return what a recorded hello says, without fields that this release does not know.

    One that cannot be read, as no release writes it, counts as that of a worker without drivers: nothing is placed
    there, and the ledger is folded all the same.
    """
    try:
        return msgspec.convert(hello, Inventory)
    except msgspec.ValidationError:
        return NO_INVENTORY
