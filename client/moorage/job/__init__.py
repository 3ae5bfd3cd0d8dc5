"""What a job may say to its worker while it runs. It needs the standard library alone.

from moorage.job import checkpoint

torch.save(state, "checkpoint/new")
os.replace("checkpoint/new", "checkpoint/last.pt")
checkpoint()
"""

from __future__ import annotations

import os
import time

__all__ = ["checkpoint"]

#: names a file that the worker removes once the checkpoint is stored
_NOW = "MOORAGE_CHECKPOINT_NOW"
_LOOK_S = 0.2


def checkpoint(wait_s: float = 0.0) -> bool:
    """Have the job's checkpoint folder stored now, as it is; return whether that is done.

    Call it when the folder is whole. With `wait_s` this waits up to so many seconds until the next attempt would begin
    with it; without, the worker does it in the background, and the job may replace files meanwhile, though not write
    into them. Returns False for a job without a checkpoint, and outside of a job. Raises OSError if the job's folder
    takes no file.
    """
    path = os.environ.get(_NOW)
    if path is None:
        return False
    with open(path, "w"):
        pass
    os.utime(path)
    until_s = time.monotonic() + wait_s
    while os.path.exists(path):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(_LOOK_S, left_s))
    return True
