"""Packages of NVIDIA's that Debian has, unpacked into a cache outside the tree and not installed."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

_KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
_DOWNLOAD_S: Final = 120


@functools.cache
def unpacked(package: str) -> tuple[Path, str]:
    """Return the folder that has the files of a package, and why they cannot be had; "" where they are there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moorage-tests" / package
    if not cache.is_dir():
        if shutil.which("apt-get") is None or not Path(_KEYRING).exists():
            return cache, "this is no Debian with its keyring"
        try:
            _unpack(package, cache)
        except (OSError, subprocess.SubprocessError) as error:
            return cache, f"the package {package} cannot be had: {error}"
    return cache, ""


def _unpack(package: str, cache: Path) -> None:
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
        for command in ([*apt, "update"], [*apt, "download", package]):
            subprocess.run(command, check=True, capture_output=True, timeout=_DOWNLOAD_S, cwd=fresh)
        [file] = fresh.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", file, fresh], check=True, capture_output=True, timeout=_DOWNLOAD_S)
        with contextlib.suppress(OSError):  # another process was faster
            fresh.rename(cache)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
