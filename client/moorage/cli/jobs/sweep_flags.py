"""The flags of a sweep: the file that has an item for each replica."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from moorage.cli.framework.console import print_err
from moorage.cli.framework.files import cannot_read

if TYPE_CHECKING:
    from moorage.cli.jobs.job_flags import JobFlags
    from moorage.client.sweeps import Sweep
    from moorage.schemas.items import Format

#: what stands for an item, or for a column of one
_PLACE: Final = re.compile(r"\{[A-Za-z_]\w*\}")
#: formats of --each, by the end of a file's name
_FORMATS: Final[dict[str, Format]] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def _warn_of_places(flags: JobFlags) -> None:
    """Say of which texts beside the command no item takes the place in braces, as nothing else would."""
    for option, text in [*(("--env", each) for each in flags.env or ()), ("--cwd", flags.cwd or "")]:
        if _PLACE.search(text):
            print_err(
                f"warning[items]: {option} {text} stays as it is: items stand in the command alone, and each replica"
                " has its own in MOORAGE_ITEM"
            )


def sweep_of(flags: JobFlags, command: Sequence[str], inline: int | None = None) -> Sweep | None:
    """Read the items of --each-line or --each, up to `inline` bytes as values (as its driver has it by default); None
    without either. Raises `Rejected`, with the line at fault."""
    from moorage.client.errors import rejected

    if flags.each_line is not None and flags.each is not None:
        raise rejected("invalid-argument", "--each-line and --each cannot be used together", next="take one of them")
    path = flags.each_line if flags.each_line is not None else flags.each
    if path is None:
        return None
    _warn_of_places(flags)
    from moorage.client.sweeps import inline_bytes, sweep_of_file, sweep_of_values
    from moorage.system.item_files import items_in

    if inline is None:
        inline = inline_bytes(flags.driver)
    format: Format | None = "lines"
    if flags.each is not None:
        format = next((each for end, each in _FORMATS.items() if path.lower().endswith(end)), None)
    if format is None:
        raise rejected(
            "invalid-argument", f"--each: what {path} holds cannot be told by its name", found=path,
            allowed=", ".join(f"*{end}" for end in _FORMATS),
            next="rename it; a file whose lines are plain text: --each-line",
        )  # fmt: skip
    try:
        if path == "-":
            texts = [item.value for _, item in items_in(sys.stdin.buffer, format)]
            return sweep_of_values(texts, command, inline)
        with open(path, "rb") as source:
            return sweep_of_file(path, source, format, command, inline)
    except OSError as error:
        raise cannot_read(path, error.strerror, "name a file with an item on each line") from None
    except ValueError as error:
        raise rejected("invalid-argument", f"stdin: {error}", next="an item is a line of text") from None
