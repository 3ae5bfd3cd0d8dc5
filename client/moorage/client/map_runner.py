"""Call the function of `AsyncClient.map` with a replica's item. This file travels with the job, and is run there.

It needs Python 3.8 and nothing else: moorage may not be installed on the host. It is run as
`python3 moorage-map/moorage_map_runner.py module NAME FUNCTION`, or as `… pickle VERSION`, where VERSION is the Python
that made the pickle. With a last word `check` it only loads the function. It exits with 1 if the function raised, and
with `CODE_NOT_LOADED` if the function cannot be loaded: so would be every other item on this host.
"""

import asyncio
import contextlib
import importlib
import inspect
import itertools
import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Sequence  # noqa: UP035 - of Python 3.8

#: the folder of what travels, in the job's folder
FOLDER = "moorage-map"
RUNNER = "moorage_map_runner.py"
ITEMS = "moorage-items.jsonl"
PICKLE = "function.pickle"
#: what the function returned, or raised: by its name and place the first in the archive of what is kept
VALUE = ".moorage-value.json"
#: bytes of a value as JSON
VALUE_BYTES_MAX = 64 << 20
#: as EX_CONFIG of sysexits.h
CODE_NOT_LOADED = 78
#: set where a function is loaded: a script that is imported there must not submit once more
VARIABLE = "MOORAGE_MAP"


def loaded(words: Sequence[str], root: Path) -> Callable[[Any], Any]:
    """Return the function. Raises whatever its import raises, and RuntimeError for another Python."""
    sys.path[0] = str(root)  # instead of this file's folder: the job's files are found as by `python3 FILE`
    if words[0] == "module":
        found = importlib.import_module(words[1])
        for name in words[2].split("."):
            found = getattr(found, name)
        return found  # type: ignore[return-value]
    here = "{}.{}".format(*sys.version_info)
    if here != words[1]:
        raise RuntimeError(
            f"the function was pickled by Python {words[1]}, and {sys.executable} is Python {here}:"
            " name another python=, or send the function as a module"
        )
    sys.path.insert(1, str(root / FOLDER))  # cloudpickle travels, too
    with (root / FOLDER / PICKLE).open("rb") as file:
        return pickle.load(file)  # type: ignore[no-any-return]


def _fix(error: Exception) -> str:
    if (getattr(error, "name", None) or "").split(".")[0] == "moorage":
        return "put it into a file that does not import moorage, or send it by how='cloudpickle'"
    return "files= brings modules, python= names a Python that has them"


def outcome(function: Callable[[Any], Any], item: Any) -> bytes:
    """Return the value or the error of a call, as JSON."""
    try:
        found = function(item)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        # not as ASCII: a text with half a character has no UTF-8, and would be read by no client
        value = json.dumps({"value": found}, allow_nan=False, ensure_ascii=False).encode()
        if len(value) > VALUE_BYTES_MAX:
            raise ValueError(f"the value has {len(value)} bytes as JSON, of at most {VALUE_BYTES_MAX}: write a file")
        return value
    except Exception as error:
        text = traceback.format_exc()
        error_of = {"kind": type(error).__name__, "message": _message(error), "traceback": text}
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            sys.stderr.write(text)
        return json.dumps({"error": {name: _readable(each) for name, each in error_of.items()}}).encode()


async def _awaited(found: Any) -> Any:
    return await found


def _message(error: Exception) -> str:
    """Return an error's text. Never raises, although some errors raise when they are turned into text."""
    try:
        return str(error)
    except Exception as broken:
        return f"its text raises {type(broken).__name__}"


def _readable(text: str) -> str:
    """Return the text with what UTF-8 cannot hold as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def main(words: Sequence[str], root: Path) -> int:
    """Do what the words of the command ask for, in the job's folder `root`, and return the exit code."""
    os.environ[VARIABLE] = "1"
    try:
        function = loaded(words, root)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.write(f"the function cannot be loaded here: {_fix(error)}\n")
        return CODE_NOT_LOADED
    if words[-1] == "check":
        return 0
    number = int(os.environ["MOORAGE_INDEX"])
    with (root / ITEMS).open(encoding="utf-8") as file:
        item = json.loads(next(itertools.islice(file, number, None)))
    written = outcome(function, item)
    (root / VALUE).write_bytes(written)
    return int(written.startswith(b'{"error"'))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent.parent))
