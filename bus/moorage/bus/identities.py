"""Make the keys of a site's users: once, private (0600).

NKeys are Ed25519 keys in the spelling of NATS (nkeys.py). `certificates` makes those of servers.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

import nkeys

from moorage.bus.site import Identity
from moorage.system.private_files import create_private

_SEED_BYTES: Final = 32


def nkey(folder: Path, identity: Identity) -> str:
    """Return the public key of a user. If `<folder>/<key>.nk` does not exist, make a new seed there. Raises OSError."""
    pair = nkeys.from_seed(bytearray(seed_of(folder, identity)))
    public: bytes = pair.public_key
    return public.decode()


def seed_of(folder: Path, identity: Identity) -> bytes:
    """Return the secret key of a user, which is made if it does not exist. Raises OSError."""
    path = folder / f"{identity.key}.nk"
    return kept(path, lambda: nkeys.encode_seed(secrets.token_bytes(_SEED_BYTES), nkeys.PREFIX_BYTE_USER)).strip()


def route_password(folder: Path) -> str:
    """Return the password that the servers of a cluster show each other; make it if there is none. Raises OSError."""
    return kept(folder / "route.password", lambda: secrets.token_hex(24).encode()).decode()


def kept(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return the content of a private file. If the file does not exist, write what `make` returns into it. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    content = make()
    create_private(path, content)
    return content
