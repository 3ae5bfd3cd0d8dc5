"""How the requests and orders of a record came: as nats-server stamped, or on a subject that alone names a sender.

`Record.ways` is flat, four numbers for each run of items that came in one way: which items (`ACCEPTS`, `ACTS` or
`STEPS`), the first, the end, and the note with the way. `ACCEPTS` counts the record's new jobs. Steps of an item that
has an act or a job are its. The way of an item in no run is not known: an earlier release wrote it, or the scheduler
made it by itself. Nothing is decided by a way, and the state has none.
"""

from __future__ import annotations

from typing import Final

ACCEPTS: Final = 0
ACTS: Final = 1
STEPS: Final = 2
WIDTH: Final = 4


def way_of(ways: list[int], notes: list[str], which: int, at: int) -> str:
    """Return how an item of a record came; "" if that is not known."""
    flat = iter(ways)
    for kind, first, end, note in zip(flat, flat, flat, flat, strict=True):
        if kind == which and first <= at < end and 0 < note <= len(notes):
            return notes[note - 1]
    return ""
