"""`moorage doctor`: checks everything that moorage needs, one line each, and says what to do about what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

from moorage.cli.doctor.checks import all_checks
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, paint, print_err, print_out
from moorage.cli.framework.exit_codes import EXIT_FAILED
from moorage.cli.framework.interrupts import run
from moorage.cli.framework.options import DEFAULTS, Options, guarded
from moorage.cli.framework.render import GAP, wrapped
from moorage.client.view.checks import Check
from moorage.schemas.units import many

_STYLE: Final = {"ok": "green", "warn": "yellow", "fail": "red"}
_NAME_CHARS: Final = 10
_COUNTED: Final = {"checks": "check", "settings": "setting", "workers": "worker"}


def doctor(
    *,
    settings: Annotated[bool, Parameter(help="Only show every setting that holds here, and where it is from.")] = False,
    example: Annotated[bool, Parameter(help="Only print a settings file with every key, each commented out.")] = False,
    bundle: Annotated[
        Path | None,
        Parameter(help="Write versions, settings, checks and the fleet, without secrets, to this new file."),
    ] = None,
    options: Options = DEFAULTS,
) -> int:
    """Check this host, the server, the permissions and the scheduler; exit code 1 if something fails.

    `warn` marks what a worker or an operator needs and this host lacks; a machine that only submits jobs may do
    without.
    """
    if example:
        from moorage.cli.framework.settings import example_file

        print_out(example_file().rstrip())
        return 0
    if settings:
        return guarded(options, lambda: _show_settings(options))

    if bundle is not None:
        return guarded(options, lambda: run(_bundle(bundle, options)))

    async def look() -> int:
        counts = dict.fromkeys(_STYLE, 0)
        async for check in all_checks(options):
            counts[check.verdict] += 1
            if options.json:
                emit(check)
            else:
                _show(check)
        if not options.json:
            print_err(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
        return EXIT_FAILED if counts["fail"] else 0

    return guarded(options, lambda: run(look()))


async def _bundle(file: Path, options: Options) -> int:
    """Write a bundle for who is asked for help; failed checks are part of it, and no failure of this command."""
    from moorage.cli.doctor import bundle
    from moorage.cli.framework.files import cannot_write

    if file.exists():
        raise cannot_write(file, "it is there already", "name a new file")
    checks = [check async for check in all_checks(options)]
    try:
        counts = await bundle.write(file, checks, options)
    except OSError as error:
        raise cannot_write(file, error.strerror, "name a new file in a folder that you may write") from None
    if options.json:
        emit({"kind": "bundle-written", **counts})
    else:
        had = ", ".join(many(counts[what], word) for what, word in _COUNTED.items())
        print_out(f"{file}\t{had}")
        print_err(f"it leaves out: {bundle.LEFT_OUT}; read it before you send it")
    return 0


def _show_settings(options: Options) -> int:
    """Print every key of every section. Flags of a running service are not known here."""
    from moorage.cli.framework.render import table
    from moorage.cli.framework.settings import effective, the_file
    from moorage.schemas.settings import NO_FILE, shown

    file = the_file()
    print_err(f"settings file: {file.path}" if file is not NO_FILE else "no settings file is used")
    every = list(effective(file))
    if options.json:
        for found in every:
            one = found.setting
            value = shown(one, found.value)
            emit({"kind": "setting", "section": one.section, "key": one.key, "value": value, "source": found.source})
        return 0
    rows = [[f.setting.section, f.setting.key, shown(f.setting, f.value), f.source] for f in every]
    print_out(table(["SECTION", "KEY", "VALUE", "FROM"], rows))
    return 0


def _show(check: Check) -> None:
    found = check.found.replace("\n", " ")
    if not sys.stdout.isatty():
        print_out("\t".join((check.verdict, check.name, found, check.fix or "-")))
        return
    first, *rest = wrapped(found, 4 + len(GAP) + _NAME_CHARS + len(GAP))
    verdict = paint(check.verdict.ljust(4), _STYLE[check.verdict], sys.stdout)
    print_out(f"{verdict}{GAP}{check.name.ljust(_NAME_CHARS)}{GAP}{first}")
    for line in rest:
        print_out(" " * (4 + len(GAP) + _NAME_CHARS + len(GAP)) + line)
    if check.fix:
        first, *rest = wrapped(check.fix, 6 + len("fix: "))
        print_out(f"      {paint('fix:', 'cyan', sys.stdout)} {first}")
        for line in rest:
            print_out(" " * (6 + len("fix: ")) + line)
