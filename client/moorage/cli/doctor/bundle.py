"""`moorage doctor --bundle FILE`: one JSON file for who is asked for help, or asks what runs here.

It has versions, settings, the doctor's checks and the leader's answer about the fleet. It has no request, no output, no
log, no value of a variable and no secret: what looks like one is cut out of the whole text before it is written.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.cli.framework.options import Options, client_of
from moorage.client.view.checks import Check
from moorage.schemas.errors import MoorageError
from moorage.system.build import build

#: for the leader's answer about the fleet
ANSWER_S_MAX: Final = 10.0
CUT: Final = "***"
LEFT_OUT: Final = "requests, output, logs, values of variables, secrets"
#: user and password of a URL; seeds of NKeys; JWTs, which creds hold too; keys in PEM form; a value named as a secret
_SECRETS: Final = re.compile(
    r"(?<=://)[^\s/@\"\\]+(?=@)"
    r"|\bS[ACNOUX][A-Z2-7]{56}\b"
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]+"
    r"|-{5}BEGIN [A-Z ]*PRIVATE KEY-{5}.*?-{5}END [A-Z ]*PRIVATE KEY-{5}"
    r"|(?<=password=)[^\s\"\\&]+|(?<=token=)[^\s\"\\&]+",
    re.DOTALL | re.IGNORECASE,
)
_NAMED_SECRET: Final = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|_KEY$|_SEED$")
#: a shorter value of such a variable would cut words that have nothing to do with it
_CHARS_MIN: Final = 8


async def write(file: Path, checks: Sequence[Check], options: Options) -> dict[str, Any]:
    """Write the bundle, which only this user may read, and return its counts. Raises OSError, also if the file is
    there."""
    fleet: Any
    try:
        fleet = await _fleet(options)
    except MoorageError as error:
        fleet = {"error": error.problem}
    except TimeoutError:
        fleet = {"error": f"the leader did not answer within {ANSWER_S_MAX:g} s"}
    settings = _settings()
    made = {
        "kind": "bundle",
        "build": build(),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "left_out": LEFT_OUT,
        "host": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "prefix": sys.prefix,
            "user": os.geteuid(),
            "packages": dict(_packages()),
            "variables": sorted(name for name in os.environ if name.startswith(("MOORAGE_", "NATS_"))),
        },
        "settings": settings,
        "checks": checks,
        "fleet": fleet,
    }
    text = without_secrets(msgspec.json.format(msgspec.json.encode(made), indent=1).decode())
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as opened:
        opened.write(text + "\n")
    workers = fleet.get("workers", []) if isinstance(fleet, dict) else []
    values = settings.get("values", [])
    return {"file": str(file), "checks": len(checks), "settings": len(values), "workers": len(workers)}


def without_secrets(text: str) -> str:
    """Return the text without what looks like a secret, and without values of variables whose names say secret."""
    for name, value in os.environ.items():
        if _NAMED_SECRET.search(name.upper()) and len(value) >= _CHARS_MIN:
            text = text.replace(msgspec.json.encode(value).decode()[1:-1], CUT)
    return _SECRETS.sub(CUT, text)


async def _fleet(options: Options) -> Any:
    """Return the leader's answer about the fleet. Raises `MoorageError`, say for a tenant's key, and TimeoutError."""
    import asyncio

    async with asyncio.timeout(ANSWER_S_MAX), client_of(options) as client:
        return (await client.fleet.show()).data


def _settings() -> dict[str, Any]:
    from moorage.cli.framework.settings import effective, the_file
    from moorage.schemas.settings import NO_FILE, shown

    try:
        file = the_file()
        rows = [
            {
                "section": found.setting.section,
                "key": found.setting.key,
                "value": shown(found.setting, found.value),
                "source": found.source,
            }
            for found in effective(file)
        ]
    except MoorageError as error:  # also where the extra `server` is missing
        return {"error": error.problem}
    return {"file": None if file is NO_FILE else str(file.path), "values": rows}


def _packages() -> Iterator[tuple[str, str]]:
    """Yield name and version of each package that moorage can use and that is installed here."""
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        wanted = requires("moorage") or []
    except PackageNotFoundError:
        return
    for name in sorted({re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in wanted}):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            pass
