"""Which ends of an attempt are followed by another one, how often, and after which pause: `Request.retry`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

#: rows of `retry`, and causes of one
RULES_MAX: Final = 16
CAUSES_MAX: Final = 16
TIMES_MAX: Final = 1000
PAUSE_S_MAX: Final = 86400.0
LOST: Final = "lost"
#: any end that counts as a failure; it fits where no other cause does
FAILURE: Final = "failure"
#: ends that have a name of their own
NAMED: Final = ("oom", LOST, "signal", "setup", "start")
_CODE: Final = re.compile(r"exit:(?:[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])", re.ASCII)
CAUSE_WORDS: Final = f"{', '.join(NAMED)}, exit:1 to exit:255, {FAILURE}"


class Retry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """How often an attempt that ended in one of some ways is followed by another one.

    A cause is `oom` (a process of it was killed for want of memory, as its cgroup or its engine says), `lost` (its
    worker was lost, or left it), `signal` (a signal ended it), `setup` (its setup command failed), `start` (its command
    could not be started), `exit:N` (by its exit code, 128 + N after the signal N), or `failure`: any end that is none
    of a name before, and any failure.
    """

    on: list[str] | str  # causes, or one
    times: int  # most further attempts of one replica for them, 0..1000; of a gang, of all of it
    pause_s: float | None = None  # seconds before each, 0..86400; null: none if lost, else 1, 2, 4 up to 60

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "on", [self.on] if isinstance(self.on, str) else self.on)
        if not 1 <= len(self.causes) <= CAUSES_MAX:
            raise ValueError(f"on must list 1..{CAUSES_MAX} causes, found {len(self.causes)}")
        for cause in self.causes:
            if cause not in NAMED and cause != FAILURE and _CODE.fullmatch(cause) is None:
                raise ValueError(f"on must be causes: {CAUSE_WORDS}, found {cause[:80]!r}")
        if not 0 <= self.times <= TIMES_MAX:
            raise ValueError(f"times must be 0..{TIMES_MAX}, found {self.times}")
        if self.pause_s is not None and not 0 <= self.pause_s <= PAUSE_S_MAX:
            raise ValueError(f"pause_s must be 0..{PAUSE_S_MAX:.0f} seconds, found {self.pause_s}")

    @property
    def causes(self) -> list[str]:
        """Its causes."""
        return [self.on] if isinstance(self.on, str) else self.on


def row_of(rows: Sequence[Retry], named: Collection[str], code: int | None) -> int:
    """Return the number, from 1, of the first row that an end with these named causes and this exit code fits; 0: none.

    A row that names the cause goes before one that names the exit code, and that before one for any failure. The code
    is minus the signal, and None of a loss, which is no failure.
    """
    codes = [] if code is None else [[f"exit:{code if code >= 0 else 128 - code}"], [FAILURE]]
    for fits in (named, *codes):
        for number, row in enumerate(rows, 1):
            if not set(fits).isdisjoint(row.causes):
                return number
    return 0
