"""The launcher in C, built where a compiler is there, into the state folder: nobody else can write to that."""

import contextlib
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("launcher.c")
NAME: Final = "launcher-"
BUILD_S_MAX: Final = 5.0
"""Of the time that an agent waits for its supervisor; it takes some 0.2 s, once for a state folder and release."""
USAGE: Final = 64
"""How it exits that is started without arguments: then it runs on this machine."""
_FLAGS: Final = ("-O2", "-std=gnu11")


def compiled_launcher(state: Path, log: Callable[[str], None]) -> str | None:
    """The program, built unless the folder has it; None, and a line in the log, where it cannot be built or run.

    Call it before there are children whose end nobody else may take.
    """
    try:
        source = SOURCE.read_bytes()
        about = "\0".join((os.uname().machine, *_FLAGS, _compiler() or "")).encode()
        path = state / (NAME + hashlib.blake2b(source + about, digest_size=8).hexdigest())
        if not path.exists():
            _build(state, path)
        if subprocess.run([path], timeout=BUILD_S_MAX, check=False).returncode == USAGE:
            log(f"starts by {path}")
            return str(path)
        log(f"{path} does not run here: launcher.py serves, starts cost a millisecond more")
    except (OSError, subprocess.SubprocessError) as error:
        log(f"no compiled launcher ({error}): launcher.py serves, starts cost a millisecond more")
    return None


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def _build(state: Path, path: Path) -> None:
    """Raises `OSError`, `SubprocessError`."""
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler: install gcc to have one")
    for old in state.glob(NAME + "*"):
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
    fresh = path.with_name(path.name + ".new")
    # Statically where that can be: there is less of it to clone.
    for flags in ((*_FLAGS, "-static"), _FLAGS):
        command = [compiler, *flags, "-o", str(fresh), str(SOURCE)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=BUILD_S_MAX, check=False)
        if done.returncode == 0:
            os.rename(fresh, path)
            return
    raise OSError(done.stderr.decode(errors="replace").strip()[-500:])
