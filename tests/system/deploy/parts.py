"""What tests/system/deploy/build brings: Debian with Python and systemd, compose, Prometheus and its tool, rclone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PARTS: Final = ("debian.tar", "docker-compose", "prometheus", "promtool", "rclone")


def parts() -> Path:
    """Return the folder of DEPLOY_PARTS, else one of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("DEPLOY_PARTS") or f"{cache}/moorage-tests/deploy")


def why_no_parts(*wanted: str) -> str:
    """Return "" where these parts are, by default all; else one line that says what is missing."""
    missing = [name for name in wanted or PARTS if not (parts() / name).exists()]
    return f"no {parts() / missing[0]}: tests/system/deploy/build brings it" if missing else ""
