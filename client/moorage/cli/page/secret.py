"""A secret that a file keeps for the page: it holds after a restart, and another one in the file holds at once."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Final

from moorage.schemas.errors import MoorageError, problem
from moorage.system.private_files import create_private, replace_private

#: below that, a secret could be guessed
CHARS_MIN: Final = 16


def new_key() -> str:
    """Return a secret that is too long to be guessed."""
    return secrets.token_urlsafe(24)


class Secret:
    """A secret: that of a file, which is made if it is not there, or one for this process alone."""

    def __init__(self, file: Path | None = None) -> None:
        """Raises `MoorageError` for a file that cannot be read or made, or has a secret that is too short."""
        self._file = file
        self._seen = _stamp(file)
        self.key = new_key() if file is None else _kept(file)

    def renewed(self) -> bool:
        """Take what the file has now. Returns whether that is another secret; a file that cannot be used changes
        nothing."""
        if self._file is None or (stamp := _stamp(self._file)) == self._seen:
            return False
        self._seen = stamp
        if stamp is None:  # it holds until the next start
            return False
        try:
            key = _kept(self._file)
        except MoorageError:
            return False
        is_new, self.key = key != self.key, key
        return is_new


def renew(file: Path) -> None:
    """Put another secret into the file. Raises OSError."""
    replace_private(file, new_key())


def _stamp(file: Path | None) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        if file is not None:
            found = file.stat()
            return found.st_ino, found.st_mtime_ns
    return None


def _kept(file: Path) -> str:
    try:
        with contextlib.suppress(FileExistsError):
            create_private(file, new_key().encode())
        kept = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MoorageError(
            problem("failed-precondition", f"cannot keep a secret in {file}: {error}", next="name another file")
        ) from None
    if len(kept) < CHARS_MIN:
        raise MoorageError(
            problem(
                "failed-precondition",
                f"{file} has a secret of {len(kept)} characters, at least {CHARS_MIN} are needed",
                next="delete the file: a new one is made",
            )
        )
    return kept
