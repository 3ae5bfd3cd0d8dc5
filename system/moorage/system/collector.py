"""Tune Python's garbage collector in moorage's own processes."""

import gc
from typing import Final

#: for `gc.set_threshold`: hardly anything of ours waits for the collector, so that it need not look every 700 objects
THRESHOLDS: Final = (20_000, 10, 10)


def leave_what_stays() -> None:
    """Exclude all present objects from collections. Call it once all has started.

    What a worker or a supervisor has started with stays, and walking over it takes some 10 ms each time, in which a
    start may wait. Not for a process that runs the user's code too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
