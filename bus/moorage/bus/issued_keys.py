"""What `nats-config` has issued: each key of a site, whose it is and since when; also keys that hold no more.

The server knows a user by its public key alone. So the folder keeps the names of earlier ones, for those that are still
connected by them. It holds no secret.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.unreadable import UNREADABLE
from moorage.system.private_files import replace_private

FILE: Final = "issued.json"
_USER: Final = re.compile(r'# (\S+) (\S+)\n\s*\{ (?:nkey: (U\w+)|user: ("(?:[^"\\]|\\.)*"))')


class Issued(msgspec.Struct, frozen=True):
    """A key: `submitter.vision`, and when it was made, in seconds since the epoch. `is_valid` is whether it holds."""

    key: str
    since_s: float
    is_valid: bool = True


def in_accounts(text: str) -> dict[str, str]:
    """Return the users of an `accounts.conf`: the names of their keys, by what the server knows them by."""
    found: dict[str, str] = {}
    for role, name, nkey, user in _USER.findall(text):
        found[nkey or msgspec.json.decode(user)] = f"{role}.{name}"
    return found


def read(folder: Path) -> dict[str, Issued]:
    """Return the keys of a site's folder, by what the server knows them by. Raises OSError for one without accounts."""
    kept = _kept(folder)
    for who, key in in_accounts((folder / "accounts.conf").read_text(encoding="utf-8")).items():
        before = kept.get(who)
        kept[who] = Issued(key, before.since_s if before is not None else _made_s(folder, key))
    return kept


def keep(folder: Path, before: str) -> None:
    """Write down the keys of the folder's accounts, and those of `before`, its accounts until now. Raises OSError."""
    known = _kept(folder)
    for who, key in in_accounts(before).items():
        known.setdefault(who, Issued(key, time.time(), is_valid=False))
    found = {**known, **read(folder)}
    replace_private(folder / FILE, msgspec.json.encode(found))


def _kept(folder: Path) -> dict[str, Issued]:
    try:
        kept = msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, Issued])
    except (OSError, *UNREADABLE):
        return {}
    return {who: msgspec.structs.replace(each, is_valid=False) for who, each in kept.items()}


def _made_s(folder: Path, key: str) -> float:
    for file in (folder / "keys" / f"{key}.nk", folder / "tls" / f"{key}.pem"):
        if file.exists():
            return file.stat().st_mtime
    return 0.0
