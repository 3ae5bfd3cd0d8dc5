"""Parts of a GPU in TFLOPS: reads such a text, and turns it into a percentage of a model.

Everywhere else a share is a percentage. The TFLOPS that a model does at half precision are in a table of capacities.
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
    """Return what percentage of a device of this model these TFLOPS are, 0..100, with a half rounded up. Return 100 (no
    limit) if `tflops` is None or the model is not in `capacities`.

    `capacities` are TFLOPS by the model's whole name.
    """
    capacity = capacities.get(model, 0.0)
    if tflops is None or capacity <= 0:
        return 100
    return min(100, math.floor(100 * tflops / capacity + 0.5))
