"""Keys of the door's callers: a file with what each may do, and the hash of the key itself."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from moorage.client.errors import rejected
from moorage.schemas.errors import MoorageError, problem
from moorage.schemas.units import many
from moorage.schemas.unreadable import UNREADABLE

#: what each key begins with, so that who finds one knows what it is
KEY_PREFIX: Final = "mk-"
RATE_S: Final = 60.0

log = logging.getLogger("moorage.door")


class Key(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the callers with one key may do. `hash` is the SHA-256 of the key."""

    name: str
    hash: str
    tenant: str
    services: tuple[str, ...] = ("*",)  # patterns of names
    priority: int = 50  # the highest that its calls may have
    at_once: int = 0  # calls at the same time; 0 for any number
    per_minute: int = 0  # calls that begin in a minute; 0 for any number
    raw: bool = False  # it may call services by name: /svc/NAME/…
    expires_s: float = 0.0  # Unix time of its end; 0 for none

    def may_call(self, service: str) -> bool:
        """Return whether the key is for this service."""
        return any(fnmatchcase(service, pattern) for pattern in self.services)


def hash_of(key: str) -> str:
    """Return the hash by which a key is known."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def new_key() -> str:
    """Return a key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def read_keys(path: Path) -> list[Key]:
    """Return the keys of a file; none if there is no file. Raises MoorageError for one that others may read."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise MoorageError(problem("failed-precondition", f"others may read {path}", next=f"chmod 600 {path}"))
            return msgspec.json.decode(file.read() or b"[]", type=list[Key])
    except FileNotFoundError:
        return []
    except (OSError, *UNREADABLE) as error:
        raise MoorageError(
            problem("failed-precondition", f"{path} is no file of keys: {error}", next="moorage door key add --help")
        ) from None


def write_keys(path: Path, keys: Iterable[Key]) -> None:
    """Put these keys in place of those of before, in one step. Raises `Rejected` where that cannot be."""
    try:
        handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(list(keys))) + b"\n")
        os.replace(made, path)
    except OSError as error:
        raise rejected("failed-precondition", f"{path} cannot be written: {error.strerror}", found=str(path)) from None


class Bound(NamedTuple):
    """The bound of a key that a call would exceed, and after how many seconds it may not any more."""

    words: str
    after_s: float


class Keyring:
    """The keys of a file, read again when it changes, and how much each is used."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._keys: dict[str, Key] = {}
        self._read: tuple[int, int, int] | None = None
        self._begun: dict[str, deque[float]] = {}
        self._at_once: dict[str, int] = {}
        self.look()

    @property
    def tenants(self) -> set[str]:
        """The tenants for which there are keys."""
        return {key.tenant for key in self._keys.values()}

    def look(self) -> None:
        """Read the file if it has changed. Raises MoorageError for one that cannot be read at first; later the keys
        stay as they were."""
        if self._path is None:
            return
        try:
            about = self._path.stat()
            seen = about.st_mtime_ns, about.st_size, about.st_ino
        except OSError:
            seen = (0, 0, 0)
        if seen == self._read:
            return
        try:
            self._keys = {key.hash: key for key in read_keys(self._path)}
        except MoorageError as error:
            if self._read is None:
                raise
            log.error("%s: the keys stay as they were", error)
        self._read = seen

    def find(self, key: str) -> Key | None:
        """Return what a key allows; None for one that is unknown or over."""
        self.look()
        found = self._keys.get(hash_of(key)) if key else None
        return None if found is None or 0 < found.expires_s <= time.time() else found

    def begin(self, key: Key) -> Bound | None:
        """Take note of a call; return what keeps it from beginning, if anything does."""
        now_s = time.monotonic()
        begun = self._begun.setdefault(key.hash, deque())
        while begun and now_s - begun[0] >= RATE_S:
            begun.popleft()
        if key.per_minute and len(begun) >= key.per_minute:
            after_s = max(0.001, RATE_S - (now_s - begun[0]))
            return Bound(f"begins at most {many(key.per_minute, 'call')} in a minute", after_s)
        if key.at_once and self._at_once.get(key.hash, 0) >= key.at_once:
            return Bound(f"has at most {many(key.at_once, 'call')} at once", 1.0)
        if key.per_minute:
            begun.append(now_s)
        self._at_once[key.hash] = self._at_once.get(key.hash, 0) + 1
        return None

    def end(self, key: Key) -> None:
        """Take note that a call of this key is over."""
        self._at_once[key.hash] -= 1
