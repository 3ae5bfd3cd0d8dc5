"""What a job may say to its worker while it runs. It needs the standard library alone.

from moorage.job import checkpoint, report

report(step=step, loss=loss)
torch.save(state, "checkpoint/new")
os.replace("checkpoint/new", "checkpoint/last.pt")
checkpoint()
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from typing import Any

__all__ = ["checkpoint", "report"]

#: names a file that the worker removes once the checkpoint is stored
_NOW = "MOORAGE_CHECKPOINT_NOW"
_LOOK_S = 0.2
#: names a file to which each report is a line of JSON
_REPORT = "MOORAGE_REPORT"
_NAMES_MAX = 16
_CHARS_MAX = 64
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./@:%-]{0,63}")


def report(values: dict[str, Any] | None = None, /, **more: Any) -> bool:
    """Report numbers of the job itself, as `report(step=120, loss=0.31)`; return whether it is a job that can.

    `moorage ls --metrics`, `show`, the page and a notebook have the newest value of each name, and `Client.reports` the
    last rows. At most 16 names, of letters, digits and `_./@:%-`; each value is a finite number, true, false, or a text
    of at most 64 characters. What has an `item()`, as numbers of numpy and torch, is taken as that. Names that cannot
    be keywords go into `values`, as `report({"val/loss": 0.4})`. Raises ValueError, TypeError for other values, and
    OSError if the job's folder takes no file.
    """
    row = {name: _plain(name, value) for name, value in {**(values or {}), **more}.items()}
    if len(row) > _NAMES_MAX:
        raise ValueError(f"report takes at most {_NAMES_MAX} names, not {len(row)}")
    path = os.environ.get(_REPORT)
    if path is None:
        return False
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(row).encode() + b"\n")  # in one piece: threads and processes may share the file
    finally:
        os.close(descriptor)
    return True


def _plain(name: str, value: Any) -> Any:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"report takes names of letters, digits and _./@:%-, at most {_CHARS_MAX}, not {name[:80]!r}")
    if not isinstance(value, bool | int | float | str) and callable(item := getattr(value, "item", None)):
        value = item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"report takes finite numbers, and {name} is {value}")
    if isinstance(value, str) and len(value) > _CHARS_MAX:
        raise ValueError(f"report takes texts of at most {_CHARS_MAX} characters, and {name} has {len(value)}")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63:
        raise ValueError(f"report takes whole numbers below 2^63, and {name} is larger")
    if not isinstance(value, bool | int | float | str):
        raise TypeError(f"report takes numbers, true, false and texts, and {name} is {type(value).__name__}")
    return value


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
