"""Run one call of an `Executor` and keep its value or its exception. This file travels with the job, and is run there.

It needs Python 3.8 and nothing else: moorage may not be installed on the host. It is run as
`python3 moorage-calls/moorage_call_runner.py VERSION`, where VERSION is the Python that pickled the calls. It exits
with 1 if the call raised, and with `CODE_NOT_LOADED` if the call cannot be loaded here. Of an executor that keeps its
processes, `moorage serve` has the function `answered` here answer calls.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import inspect
import io
import json
import os
import pickle
import signal
import struct
import sys
import threading
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
#: the variable of the seconds without a call after which a process that answers calls ends
IDLE = "EXECUTOR_IDLE_S"
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


def answered(data: bytes) -> bytes:
    """Return what became of a call that `moorage serve` has received: the Python that pickled it, and the call."""
    _life.begin()
    try:
        folder = str(Path(__file__).resolve().parent / FOLDER)
        if folder not in sys.path:
            sys.path.insert(1, folder)
        version, _, content = data.partition(b"\n")
        try:
            _check(version.decode())
            function, arguments = call_at(io.BytesIO(content), 0)
            loaded, given = _loaded(function), pickle.loads(arguments)
        except Exception as error:
            return kept(error=_not_loaded(error))
        try:
            return kept(done(loaded, given))
        except Exception as error:
            traceback.print_exc()
            return kept(error=error)
    finally:
        _life.end()


@functools.lru_cache(maxsize=64)
def _loaded(function: bytes) -> Any:
    return pickle.loads(function)  # once: what it keeps in its module or in itself is there for the next call


class _Life:
    """Has this process asked to end once it had no call for some time: who submitted it may be gone."""

    def __init__(self) -> None:
        self._running = 0
        self._turn = threading.Lock()
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        with self._turn:
            self._running += 1
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def end(self) -> None:
        with self._turn:
            self._running -= 1
            if not self._running:
                self._timer = threading.Timer(float(os.environ[IDLE]), _leave)
                self._timer.daemon = True
                self._timer.start()


def _leave() -> None:
    os.kill(os.getppid(), signal.SIGTERM)  # `moorage serve`, which then ends this process


_life = _Life()


def _check(version: str) -> None:
    here = "{}.{}".format(*sys.version_info)
    if here != version:
        raise RuntimeError(
            f"the call was pickled by Python {version}, and {sys.executable} is Python {here}: name another python="
        )


def _not_loaded(error: Exception) -> Exception:
    if not isinstance(error, ImportError):
        return error
    return RuntimeError(
        f"{error}: {sys.executable} of this host loads the call; python= names a Python that has it, files= brings"
        " files"
    )


def main(words: Sequence[str], root: Path) -> int:
    """Run the call of this replica, in the job's folder `root`, and return the exit code."""
    sys.path[0] = str(root)  # instead of this file's folder: the job's files are found as by `python3 FILE`
    sys.path.insert(1, str(root / FOLDER))  # cloudpickle travels, too
    try:
        _check(words[0])
        function, arguments = map(pickle.loads, _call_of_here(root))
    except Exception as error:
        traceback.print_exc()
        (root / VALUE).write_bytes(kept(error=_not_loaded(error)))
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
