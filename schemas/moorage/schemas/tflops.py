"""A part of a GPU in TFLOPS: what such a text says, and what percentage of a model it is. Pure.

A share is a percentage everywhere else. It is turned into one where the model is known, by a table of capacities: what
each model does at half precision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

_TEXT: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([mkKMG]?)")
_UNITS: Final = {"": 1.0, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}


def parse_tflops(text: str) -> float:
    """Return the TFLOPS that a text says: a plain number, or one with m (thousandths), k or K, M or G.

    Raises ValueError.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"tflops must be a number, alone or with m, k, K, M or G behind it, found {text[:40]!r}")
    return float(found[1]) * _UNITS[found[2]]


def percent_of(tflops: float | None, model: str, capacities: Mapping[str, float]) -> int:
    """Return the percentage of a device of this model, 0..100; 100, which is no limit, where either is not known.

    `capacities` are TFLOPS by the model's whole name. A half is rounded up.
    """
    capacity = capacities.get(model, 0.0)
    if tflops is None or capacity <= 0:
        return 100
    return min(100, math.floor(100 * tflops / capacity + 0.5))
