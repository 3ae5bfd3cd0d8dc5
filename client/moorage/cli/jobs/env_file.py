"""Reads files of variables: `NAME=VALUE` lines as a shell has them, with `export`, quotes and comments.

Nothing is expanded: `$HOME` stays as it is written. What a shell would read otherwise is refused by file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from moorage.cli.framework.files import cannot_read
from moorage.client.errors import Rejected, rejected

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPORT: Final = re.compile(r"export\s+")
_ESCAPED: Final = re.compile(r"\\(.)")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}


def lines_of(file: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield file and line, name, and what is behind the `=`, of each variable in a file; None for a name alone.

    Raises `Rejected` if it cannot be read. `named` and `plain` check what was found.
    """
    try:
        with open(file, encoding="utf-8-sig") as source:  # as editors on Windows begin a file
            lines = source.read().split("\n")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise cannot_read(file, why, "name a file with NAME=VALUE lines") from None
    for number, line in enumerate(lines, 1):
        name, equals, value = _EXPORT.sub("", line.strip(), count=1).partition("=")
        if (name or equals) and not name.startswith("#"):
            yield f"--env-file {file}, line {number}", name, value.strip() if equals else None


def named(where: str, name: str) -> str:
    """Return a variable's name. Raises `Rejected` if it is none."""
    if _NAME.fullmatch(name) is None:
        raise rejected(
            "invalid-argument", f"{where}: no name of a variable before =", field="$.run.env", found=name[:80],
            allowed="letters, digits and _, and no digit first", next="write NAME=VALUE, or # before a comment",
        )  # fmt: skip
    return name


def plain(where: str, text: str) -> str:
    """Return a value without its quotes. Raises `Rejected` where it is not clear what is meant."""
    quote = text[:1]
    if quote not in ("'", '"'):
        if " #" in text or "\t#" in text:
            raise _unclear(where, "a # behind a blank, which may begin a comment", "put the value in quotes")
        return text
    end = _end_of(text, quote)
    if end < 0:
        raise _unclear(where, f"no second {quote}", "end a value in its line; \\n in double quotes is a newline")
    behind = text[end + 1 :].strip()
    if behind and not behind.startswith("#"):
        raise _unclear(where, f"more behind the second {quote}", "put all of the value in quotes")
    inside = text[1:end]
    return inside if quote == "'" else _ESCAPED.sub(lambda found: _ESCAPES.get(found[1], found[1]), inside)


def _end_of(text: str, quote: str) -> int:
    """Return where the quotes end; -1 if they do not. In double quotes, `\\` takes its meaning from what follows."""
    at = 1
    while at < len(text):
        if text[at] == quote:
            return at
        at += 2 if text[at] == "\\" and quote == '"' else 1
    return -1


def _unclear(where: str, why: str, fix: str) -> Rejected:
    return rejected("invalid-argument", f"{where}: {why}", field="$.run.env", next=fix)  # the value may be a secret
