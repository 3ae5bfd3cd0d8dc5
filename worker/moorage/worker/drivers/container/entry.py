"""Give containers their secrets: a file in memory, read by a small program that then becomes the image's own program.

The file is in a folder that only the agent's user can enter (memory_folder.py), and is mounted into one container. It
is removed once the container has started, whose mount keeps the content, or once the start failed. The next agent
removes files that an agent left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moorage.worker.attempt.memory_folder import MemoryFolder, NoMemory
from moorage.worker.supervisor.capped_output import key_digest
from moorage.worker.supervisor.launcher_client import open_compiled

#: where the build hook (worker/build_hook.py) puts the program, compiled from entry.c
PROGRAM: Final = Path(__file__).with_name("entry.bin")
#: as in entry.c
CONTRACT: Final = 101
#: paths in the container
PROGRAM_AT: Final = "/run/moorage/entry"
VARIABLES_AT: Final = "/run/moorage/variables"


class NoEntry(Exception):
    """This host cannot give secrets to containers."""


class Entries:
    """The files of secrets of one driver: `owner` is its name from `owner_of`, `mark` that of its state folder."""

    def __init__(self, owner: str, mark: str) -> None:
        self.folder: Final = MemoryFolder(f"moorage-secrets-{key_digest(f'{mark}|{owner}')}")

    def write(self, key: str, variables: Mapping[str, str]) -> Path:
        """Write the variables of an attempt and return their file, which every user of its container may read.

        Raises NoEntry.
        """
        descriptor, why = open_compiled(PROGRAM, CONTRACT)
        if descriptor < 0:
            raise NoEntry(f"{why}; a job with secrets needs it")
        os.close(descriptor)
        try:
            path = self.folder.open() / key_digest(key)
            path.unlink(missing_ok=True)
            text = b"".join(f"{name}={value}".encode() + b"\0" for name, value in variables.items())
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(number, "wb") as file:
                file.write(text)
                os.fchmod(number, 0o444)
        except NoMemory as error:
            raise NoEntry(f"a job with secrets needs a folder in memory: {error}") from None
        except OSError as error:
            raise NoEntry(f"secrets cannot be written to {self.folder.path}: {error.strerror or error}") from None
        return path

    def remove(self, key: str) -> None:
        """Remove the file of an attempt, if there is one: its container has read it, or never will."""
        with contextlib.suppress(OSError):
            (self.folder.path / key_digest(key)).unlink(missing_ok=True)
        self.folder.close()

    def clear(self) -> None:
        """Remove the files that an earlier agent left."""
        with contextlib.suppress(OSError):
            for path in self.folder.path.iterdir():
                path.unlink()
        self.folder.close()


def mounts_of(variables: Path) -> list[dict[str, Any]]:
    """Return the mounts, in the form of an engine's API, of a container that gets the variables in this file."""
    return [
        {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": True}
        for source, target in ((PROGRAM, PROGRAM_AT), (variables, VARIABLES_AT))
    ]


def words_of(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the entry point and command of a container that gets secrets and then becomes this command line."""
    return {"Entrypoint": [PROGRAM_AT, VARIABLES_AT], "Cmd": list(words)}
