"""NVIDIA's own libcuda, which looks functions up without a GPU: Debian's package, unpacked into a cache."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

_PACKAGE: Final = "libcuda1"
_KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
_DOWNLOAD_S: Final = 120


@functools.cache
def folder() -> tuple[str, str]:
    """Return the folder that has libcuda.so.1, or "" and why it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moorage-tests" / _PACKAGE
    if not cache.is_dir():
        if shutil.which("apt-get") is None or not Path(_KEYRING).exists():
            return "", "this is no Debian with its keyring"
        try:
            _unpack(cache)
        except (OSError, subprocess.SubprocessError) as error:
            return "", f"the package {_PACKAGE} cannot be had: {error}"
    found = next(cache.glob("usr/lib/*/nvidia/current/libcuda.so.1"), None)
    return (str(found.parent), "") if found else ("", f"the package {_PACKAGE} has no libcuda.so.1")


def _unpack(cache: Path) -> None:
    fresh = cache.with_name(f"{cache.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        for part in ("lists/partial", "archives/partial"):
            (fresh / part).mkdir(parents=True)
        (fresh / "list").write_text(f"deb [signed-by={_KEYRING}] http://deb.debian.org/debian trixie non-free\n")
        options = [
            f"Dir::Etc::sourcelist={fresh}/list", "Dir::Etc::sourceparts=-", f"Dir::State::lists={fresh}/lists",
            f"Dir::Cache={fresh}", "Acquire::Languages=none", "APT::Sandbox::User=root",
        ]  # fmt: skip
        apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
        for command in ([*apt, "update"], [*apt, "download", _PACKAGE]):
            subprocess.run(command, check=True, capture_output=True, timeout=_DOWNLOAD_S, cwd=fresh)
        [package] = fresh.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, fresh], check=True, capture_output=True, timeout=_DOWNLOAD_S)
        with contextlib.suppress(OSError):  # another process was faster
            fresh.rename(cache)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
