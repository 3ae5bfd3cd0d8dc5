"""Run one call of an `Executor` and keep its value or its exception. This file travels with the job, and is run there.

It needs Python 3.8 and nothing else: moorage may not be installed on the host. It is run as
`python3 moorage-calls/moorage_call_runner.py VERSION`, where VERSION is the Python that pickled the calls. It exits
with 1 if the call raised, and with `CODE_NOT_LOADED` if the call cannot be loaded here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import json
import os
import pickle
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, Sequence  # noqa: UP035 - of Python 3.8

#: the folder of what travels, in the job's folder
FOLDER = "moorage-calls"
RUNNER = "moorage_call_runner.py"
#: the calls of a job that has them in a file: where each function and its arguments are, then these
CALLS = "calls.bin"
PLACE = struct.Struct("<4Q")
#: the call of a replica whose job has the calls in its request
ITEM = "MOORAGE_ITEM"
#: a line of JSON on what became of the call, then the pickled value or exception
VALUE = ".moorage-value.pickle"
#: bytes of a pickled value
VALUE_BYTES_MAX = 1 << 30
#: as EX_CONFIG of sysexits.h
CODE_NOT_LOADED = 78


def packed(calls: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the file of these calls, each a pickled function and its pickled arguments; equal ones are there once."""
    at: dict[bytes, int] = {}
    end = PLACE.size * len(calls)
    for call in calls:
        for blob in call:
            if blob not in at:
                at[blob], end = end, end + len(blob)
    places = [PLACE.pack(at[one], len(one), at[two], len(two)) for one, two in calls]
    return b"".join([*places, *at])


def call_at(content: Any, number: int) -> tuple[bytes, bytes]:
    """Return the function and the arguments of a call, from an open file of calls."""
    content.seek(PLACE.size * number)
    at, size, args_at, args_size = PLACE.unpack(content.read(PLACE.size))
    content.seek(at)
    function = content.read(size)
    content.seek(args_at)
    return function, content.read(args_size)


def _call_of_here(root: Path) -> tuple[bytes, bytes]:
    item = os.environ.pop(ITEM, None)
    path = root / FOLDER / CALLS
    if path.exists():
        with path.open("rb") as file:
            return call_at(file, int(os.environ["MOORAGE_INDEX"]))
    if item is None:
        raise RuntimeError("the call has not come")
    function, _, arguments = item.partition(" ")
    return base64.b64decode(function), base64.b64decode(arguments)


def done(function: Any, arguments: tuple[bool, Any, dict[str, Any]]) -> Any:
    """Return the value of a call, or the values of a chunk of calls."""
    is_chunk, positional, named = arguments
    return [_value(function(*each)) for each in positional] if is_chunk else _value(function(*positional, **named))


def _value(found: Any) -> Any:
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found: Any) -> Any:
    return await found


def kept(value: Any = None, error: Exception | None = None) -> bytes:
    """Return what is kept of a call: of its value, or of the exception that it raised."""
    if error is None:
        return b"{}\n" + _dumps(value)
    where = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
    lines = traceback.format_exception(type(error), error, where or error.__traceback__)
    told = {"kind": type(error).__name__, "message": _text(error), "traceback": "".join(lines)}
    blob = b""
    with contextlib.suppress(Exception):  # of whatever it refers to: its text is told in any case
        blob = _dumps(error)
        pickle.loads(blob)  # some are pickled, and cannot be made again
        told["pickled"] = "yes"
    readable = {name: text.encode("utf-8", "backslashreplace").decode() for name, text in told.items()}
    return json.dumps(readable).encode() + b"\n" + blob


def _dumps(value: Any) -> bytes:
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]

    blob: bytes = cloudpickle.dumps(value, protocol=5)
    if len(blob) > VALUE_BYTES_MAX:
        raise ValueError(f"the value has {len(blob)} bytes, of at most {VALUE_BYTES_MAX}: write a file, and keep that")
    return blob


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"its text raises {type(broken).__name__}"


def main(words: Sequence[str], root: Path) -> int:
    """Run the call of this replica, in the job's folder `root`, and return the exit code."""
    sys.path[0] = str(root)  # instead of this file's folder: the job's files are found as by `python3 FILE`
    sys.path.insert(1, str(root / FOLDER))  # cloudpickle travels, too
    here = "{}.{}".format(*sys.version_info)
    try:
        if here != words[0]:
            raise RuntimeError(
                f"the call was pickled by Python {words[0]}, and {sys.executable} is Python {here}:"
                " name another python="
            )
        function, arguments = map(pickle.loads, _call_of_here(root))
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, ImportError):
            error = RuntimeError(
                f"{error}: {sys.executable} of this host loads the call; python= names a Python that has it, files="
                " brings files"
            )
        (root / VALUE).write_bytes(kept(error=error))
        return CODE_NOT_LOADED
    try:
        written, code = kept(done(function, arguments)), 0
    except Exception as error:
        written, code = kept(error=error), 1
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            traceback.print_exc()
    (root / VALUE).write_bytes(written)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent.parent))
