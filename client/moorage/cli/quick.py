"""The plain forms of the commonest verbs, read without cyclopts: it would be a third of their processor time.

Only what is certain is read here: bare words, switches, options followed by a value, and a command behind `--`.
Whatever else stands on the line, or may be wrong with it, is left to cyclopts; `tests/cli/test_quick.py` compares the
two.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple


class Plain(NamedTuple):
    """A verb's function, and how many bare words it takes; with `has_flags` a request's flags and a command."""

    where: str
    words_min: int
    words_max: int
    has_flags: bool = False


class Line(NamedTuple):
    """A line as it was read: the words (or the command), the common options, and a request's flags."""

    verb: str
    words: list[str]
    options: dict[str, Any]
    flags: dict[str, Any]


WORDS_MAX: Final = 1000
PLAIN: Final = {
    "run": Plain("moorage.cli.run:run", 0, 0, has_flags=True),
    "submit": Plain("moorage.cli.submit:submit", 0, 0, has_flags=True),
    "ls": Plain("moorage.cli.jobs:ls", 0, 0),
    "show": Plain("moorage.cli.jobs:show", 1, WORDS_MAX),
    "cancel": Plain("moorage.cli.jobs:cancel", 1, WORDS_MAX),
    "explain": Plain("moorage.cli.explain:explain", 1, WORDS_MAX),
    "wait": Plain("moorage.cli.wait:wait", 0, WORDS_MAX),
    "fleet": Plain("moorage.cli.fleet:fleet", 0, 0),
    "drain": Plain("moorage.cli.fleet:drain", 1, 1),
    "cordon": Plain("moorage.cli.fleet:cordon", 1, 1),
    "uncordon": Plain("moorage.cli.fleet:uncordon", 1, 1),
    "audit": Plain("moorage.cli.audit:audit", 0, 0),
    "errors": Plain("moorage.cli.lookup:errors", 0, 1),
    "schema": Plain("moorage.cli.lookup:schema", 0, 1),
}
_COLOURS: Final = ("auto", "always", "never")
#: what a field's annotation begins with, and what its option takes; one of another kind is left to cyclopts
_KINDS: Final = {"str": "text", "bool": "switch", "int": "number", "list": "list"}
_ANNOTATED: Final = re.compile(r"Annotated\[(\w+)")


def read(line: Sequence[str]) -> Line | None:
    """The line, or None for one that is not certainly plain."""
    plain = PLAIN.get(line[0]) if line else None
    if plain is None:
        return None
    from moorage.cli.options import Options

    known = _options_of(Options)
    flag_names: frozenset[str] = frozenset()
    if plain.has_flags:
        from moorage.cli.submit import JobFlags

        flags_known = _options_of(JobFlags)
        flag_names = frozenset(name for name, _ in flags_known.values())
        known = flags_known | known
    words: list[str] = []
    given: dict[str, Any] = {}
    rest = iter(line[1:])
    for word in rest:
        if word == "--" and plain.has_flags:
            words += rest
            break
        if word in known:
            name, kind = known[word]
            if not _take(given, name, kind, rest):
                return None
        elif not word or word.startswith("-") or plain.has_flags:
            return None
        else:
            words.append(word)
    if not plain.has_flags and not plain.words_min <= len(words) <= plain.words_max:
        return None
    if given.get("color", "auto") not in _COLOURS:
        return None
    flags = {name: value for name, value in given.items() if name in flag_names}
    return Line(line[0], words, {name: value for name, value in given.items() if name not in flag_names}, flags)


def _options_of(kind: type[Any]) -> dict[str, tuple[str, str]]:
    """Option -> (field, what it takes) of a dataclass whose annotations are text."""
    found = {}
    for field in dataclasses.fields(kind):
        annotated = _ANNOTATED.match(str(field.type))
        takes = _KINDS.get(annotated[1], "") if annotated is not None else ""
        found["--" + field.name.replace("_", "-")] = (field.name, "text" if field.name == "color" else takes)
    return found


def _take(given: dict[str, Any], name: str, kind: str, rest: Iterator[str]) -> bool:
    """Read an option's value; False for what is not certain."""
    if kind == "switch":
        given[name] = True
        return True
    value = next(rest, "")
    if not value or value.startswith("-") or (name in given and kind != "list"):
        return False
    if kind == "list":
        given.setdefault(name, []).append(value)
    elif kind == "text":
        given[name] = value
    elif kind == "number" and value.isascii() and value.isdigit():
        given[name] = int(value)
    else:
        return False
    return True


def command(line: Sequence[str]) -> Callable[[], int] | None:
    """What runs the line; None for one that is not certainly plain."""
    found = read(line)
    if found is None:
        return None
    from moorage.cli.options import Options

    module, _, function = PLAIN[found.verb].where.partition(":")
    act: Callable[..., int] = getattr(importlib.import_module(module), function)
    more: dict[str, Any] = {}
    if PLAIN[found.verb].has_flags:
        from moorage.cli.submit import JobFlags

        more["flags"] = JobFlags(**found.flags)
    return lambda: act(*found.words, options=Options(**found.options), **more)
