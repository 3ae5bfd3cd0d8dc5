"""Arrays of numpy as data of calls and as answers: their bytes in C order, with the header `Moorage-Array`.

The header has the dtype as numpy writes it in short, and the sizes: `<f4 3 224 224`. numpy is imported where an array
comes, and not before; where it is not installed, the value is the bytes.
"""

from __future__ import annotations

import math
import re
import sys
from importlib import import_module
from typing import Any, Final

#: header of data or of an answer that is an array
ARRAY: Final = "Moorage-Array"
#: numbers and truth values; what is made of objects, fields or texts has no bytes of its own
_DTYPE: Final = re.compile(r"[<>|][biufc]\d{1,2}")
_SIZES_MAX: Final = 32
_DIGITS_MAX: Final = 15
_SHOWN: Final = 60


def is_array(value: object) -> bool:
    """Return whether a value is an array of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def plain_number(value: object) -> object:
    """Return a number of numpy's own kinds, which JSON does not know, as Python's. Raises TypeError for any
    other value."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    item: object = value.item()
    return item


def encoded_array(value: object) -> tuple[bytes, str] | None:
    """Return an array's bytes and its header; None for any other value. Raises TypeError for an array that is not of
    numbers or truth values, and for a masked one."""
    if not is_array(value):
        return None
    array: Any = value
    kind = str(array.dtype.str)
    if not _DTYPE.fullmatch(kind):
        raise TypeError(f"an array of {str(array.dtype)[:_SHOWN]} is none of numbers: send one that is, or its bytes")
    if hasattr(array, "mask"):
        raise TypeError("a masked array has no bytes for what is masked: send it filled, and its mask beside it")
    return array.tobytes(), " ".join([kind, *map(str, array.shape)])


def decoded_array(data: bytes, header: str) -> Any:
    """Return the array that these bytes are, which may be written to; the bytes where numpy is not installed. Raises
    ValueError for a header that is none, or one of an array with another number of bytes."""
    kind, *sizes = header.split(" ")
    numbers = [int(size) for size in sizes if size.isdecimal() and len(size) <= _DIGITS_MAX]
    if not _DTYPE.fullmatch(kind) or len(numbers) < len(sizes) or len(sizes) > _SIZES_MAX:
        raise ValueError(f"{ARRAY} must be a dtype and sizes, as '<f4 3 224 224', found {header[:_SHOWN]!r}")
    try:
        numpy = import_module("numpy")
    except ImportError:
        return data
    try:
        dtype = numpy.dtype(kind)
    except TypeError as error:
        raise ValueError(f"{ARRAY}: {error}") from None
    expected = math.prod(numbers) * dtype.itemsize
    if expected != len(data):
        raise ValueError(f"an array of {header[:_SHOWN]} has {expected} bytes, found {len(data)}")
    return numpy.frombuffer(bytearray(data), dtype).reshape(numbers)
