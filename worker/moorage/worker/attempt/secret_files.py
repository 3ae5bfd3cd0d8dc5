"""Read the secrets that a request names: one small file each, in a folder of the host that only the agent reads."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from moorage.schemas.job import Secret
from moorage.schemas.names import SECRET_WORDS, is_secret
from moorage.schemas.service import CALL_SECRETS, CALLER_SECRETS
from moorage.system.device_environment import JobEnvironment
from moorage.worker.attempt.environment import LacksHere, lay_over

SECRET_BYTES_MAX: Final = 32 * 1024

SecretFault = Literal[
    "name", "folder", "missing", "not-a-file", "readable-by-others", "too-large", "not-text", "authority"
]


class SecretRefused(LacksHere):
    """A secret cannot be resolved here. It has the secret's name and what is wrong, never a byte of the value."""

    def __init__(self, name: str, fault: SecretFault) -> None:
        self.name: Final = name
        self.fault: Final[SecretFault] = fault
        super().__init__(f"secret {name[:80]!r}: {_SECRET_FAULTS[fault]}", found=fault)


_SECRET_FAULTS: Final[dict[SecretFault, str]] = {
    "name": f"a name has {SECRET_WORDS}",
    "folder": "the worker's folder of secrets (secrets_dir) is missing, or others may write to it",
    "missing": "there is no such file in the worker's folder of secrets",
    "not-a-file": "it is not a regular file",
    "readable-by-others": "its file must be readable by its owner alone (mode 0600 or 0400)",
    "too-large": f"it has more than {SECRET_BYTES_MAX} bytes",
    "not-text": "it is not UTF-8 text without NUL",
    "authority": "the file `ca` of the worker's nats context, by which jobs trust the servers, cannot be read",
}


def resolve_secrets(requested: Mapping[str, str | Secret], folder: Path | None) -> JobEnvironment:
    """Return the request's variables with each secret read from the file of that name in `folder`.

    Only the agent reads the folder. No other user may be able to write to it, and each file must be readable by its
    owner alone. A file has at most `SECRET_BYTES_MAX` bytes; one newline at its end is dropped. Raises SecretRefused.
    """
    return JobEnvironment(
        (name, value if isinstance(value, str) else read_secret(value.secret, folder))
        for name, value in requested.items()
    )


def secret_variables(requested: Mapping[str, str | Secret], folder: Path | None) -> JobEnvironment:
    """Return the secret variables of a request, resolved, without reserved names. Raises SecretRefused.

    A driver whose engine shows variables passes these in another way.
    """
    secrets = {name: value for name, value in requested.items() if isinstance(value, Secret)}
    return lay_over(resolve_secrets(secrets, folder), {})


def trouble_with_secrets(folder: Path) -> str:
    """Return why secrets, or which secret, cannot be read from this folder now; "" if all can."""
    try:
        mode = folder.stat().st_mode
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name not in (CALL_SECRETS, CALLER_SECRETS))
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} may be written to by others (mode {stat.S_IMODE(mode):o})"
    for name in names:
        if name.startswith(".") or not is_secret(name):
            continue  # not a name that a secret can have
        try:
            read_secret(name, folder)
        except SecretRefused as refused:
            return str(refused)
    return ""


def read_secret(name: str, folder: Path | None) -> str:
    """Return a secret of the folder. Raises SecretRefused."""
    if not is_secret(name):
        raise SecretRefused(name, "name")
    if folder is None:
        raise SecretRefused(name, "folder")
    try:
        folder_number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        raise SecretRefused(name, "folder") from None
    try:
        if os.fstat(folder_number).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SecretRefused(name, "folder")
        return _read_secret_file(name, folder_number)
    finally:
        os.close(folder_number)


def _read_secret_file(name: str, folder_number: int) -> str:
    try:
        # Non-blocking, so that opening a FIFO cannot block the agent before the file's type is checked.
        number = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder_number)
    except OSError:
        raise SecretRefused(name, "missing") from None
    try:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            raise SecretRefused(name, "not-a-file")
        if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SecretRefused(name, "readable-by-others")
        with open(number, "rb", closefd=False) as file:
            value = file.read(SECRET_BYTES_MAX + 1)
    finally:
        os.close(number)
    if len(value) > SECRET_BYTES_MAX:
        raise SecretRefused(name, "too-large")
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise SecretRefused(name, "not-text") from None
    if "\0" in text:
        raise SecretRefused(name, "not-text")
    return text.removesuffix("\n")
