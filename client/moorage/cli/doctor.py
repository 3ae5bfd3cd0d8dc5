"""`moorage doctor`: is everything there that moorage needs, a line a thing, and what to do about it."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from moorage.cli.checks import Check, all_checks
from moorage.cli.console import EXIT_FAILED, emit, paint, say, tell
from moorage.cli.options import DEFAULTS, Options, guarded

_STYLE: Final = {"ok": "green", "warn": "yellow", "fail": "red"}
_NAME_CHARS: Final = 10


def doctor(*, options: Options = DEFAULTS) -> int:
    """Look at this host, the server, the permissions and the scheduler; exit code 1 when something fails.

    `warn` is what a worker or an operator would miss here: a submitter's machine may well do without.
    """

    async def look() -> int:
        counts = dict.fromkeys(_STYLE, 0)
        async for check in all_checks(options):
            counts[check.verdict] += 1
            if options.json:
                emit(check)
            else:
                _show(check)
        if not options.json:
            say(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
        return EXIT_FAILED if counts["fail"] else 0

    return guarded(options, lambda: asyncio.run(look()))


def _show(check: Check) -> None:
    found = check.found.replace("\n", " ")
    if not sys.stdout.isatty():
        tell("\t".join((check.verdict, check.name, found, check.fix or "-")))
        return
    tell(
        f"{paint(check.verdict.ljust(4), _STYLE[check.verdict], sys.stdout)}  {check.name.ljust(_NAME_CHARS)}  {found}"
    )
    if check.fix:
        tell(f"      {paint('fix:', 'cyan', sys.stdout)} {check.fix}")
