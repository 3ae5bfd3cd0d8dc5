"""Which paths a `.moorageignore` leaves out: the rules of `.gitignore`, as git itself reads them.

Git looks at each path of a level by itself: the last pattern that matches this very path decides, and nothing below a
folder that is left out is looked at. pathspec decides by the whole path at once, where a pattern of a folder also
matches what lies below it, so it brings and leaves out other files (about 7 % of random lists). The patterns are those
of git's `wildmatch.c`, on bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

#: characters with a meaning in a pattern; git compares what stands before the first of them as it is
_SPECIAL: Final = re.compile(rb"[*?\[\\]")
#: a pattern that git takes for malformed matches nothing
_NOTHING: Final = rb"(?!)"
#: the classes of characters that git knows: those of C's locale
_CLASSES: Final = {
    b"alnum": rb"0-9A-Za-z",
    b"alpha": rb"A-Za-z",
    b"blank": rb"\ \t",
    b"cntrl": rb"\x00-\x1f\x7f",
    b"digit": rb"0-9",
    b"graph": rb"!-~",
    b"lower": rb"a-z",
    b"print": rb"\ -~",
    b"punct": rb"!-/:-@\[-`{-~",
    b"space": rb"\ \t-\r",
    b"upper": rb"A-Z",
    b"xdigit": rb"0-9A-Fa-f",
}


class Rule(NamedTuple):
    """One pattern: it leaves a path out, or, negated, brings it. `named` is compared with the last part of the path
    alone."""

    matches: re.Pattern[bytes]
    named: bool
    folders_alone: bool
    leaves_out: bool


def rules_of(text: bytes) -> list[Rule]:
    """Return the rules of a list of patterns, one on each line. Nothing in such a list is an error, as for git."""
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")  # Windows writes a byte order mark
    return [_rule(_trimmed(line.removesuffix(b"\r"))) for line in lines if line and not line.startswith(b"#")]


def leaves_out(rules: Iterable[Rule], path: bytes, *, is_folder: bool) -> bool | None:
    """Return whether these rules leave out a path, relative to the folder of their list; None if none matches it.

    What contains the path must not be left out itself.
    """
    found = None
    name = path.rpartition(b"/")[2]
    for rule in rules:
        if (is_folder or not rule.folders_alone) and rule.matches.fullmatch(name if rule.named else path):
            found = rule.leaves_out
    return found


def _trimmed(line: bytes) -> bytes:
    """Return a line without the blanks at its end; one behind a backslash stays."""
    end = len(line.rstrip(b" "))
    backslashes = end - len(line[:end].rstrip(b"\\"))
    return line[: end + (1 if backslashes % 2 and end < len(line) else 0)]


def _rule(pattern: bytes) -> Rule:
    leaves = not pattern.startswith(b"!")
    pattern = pattern.removeprefix(b"!")
    folders_alone = pattern.endswith(b"/")
    pattern = pattern.removesuffix(b"/")
    named = b"/" not in pattern
    pattern = pattern.removeprefix(b"/")
    special = _SPECIAL.search(pattern)
    literal = len(pattern) if special is None else special.start()
    # what follows the literal part is a pattern of its own for git: `a**/b` is `a`, then `**/b`
    regex = re.escape(pattern[:literal]) + (_translated(pattern[literal:]) or _NOTHING if special else b"")
    return Rule(re.compile(regex, re.DOTALL), named, folders_alone, leaves)


def _translated(pattern: bytes) -> bytes | None:
    """Return a pattern as a regular expression; None for one that git takes for malformed."""
    regex, at = b"", 0
    while at < len(pattern):
        byte, at = pattern[at : at + 1], at + 1
        if byte == b"\\":
            if at == len(pattern):
                return None
            regex, at = regex + re.escape(pattern[at : at + 1]), at + 1
        elif byte == b"?":
            regex += rb"[^/]"
        elif byte == b"[":
            found = _bracket(pattern, at)
            if found is None:
                return None
            one, at = found
            regex += one
        elif byte == b"*":
            first = at - 1
            while pattern[at : at + 1] == b"*":
                at += 1
            is_part = at - first > 1 and (first == 0 or pattern[first - 1 : first] == b"/")
            if is_part and pattern[at : at + 1] == b"/":
                regex, at = regex + rb"(?:.*/)?", at + 1
            elif is_part and (at == len(pattern) or pattern[at : at + 2] == b"\\/"):
                regex += rb".*"
            else:
                regex += rb"[^/]*"
        else:
            regex += re.escape(byte)
    return regex


def _bracket(pattern: bytes, at: int) -> tuple[bytes, int] | None:
    """Return the characters in brackets as a regular expression, and where they end; `at` is behind the first bracket.

    None if they do not end, or name an unknown class.
    """
    negated = pattern[at : at + 1] in (b"!", b"^")
    at += negated
    chars, before, begin = b"", b"", at
    while True:
        byte = pattern[at : at + 1]
        if not byte:
            return None
        if byte == b"]" and at > begin:
            break
        if byte == b"-" and before and pattern[at + 1 : at + 2] not in (b"", b"]"):
            at += 1
            if pattern[at : at + 1] == b"\\":
                at += 1
            last = pattern[at : at + 1]
            if not last:
                return None
            if before <= last:
                chars += re.escape(before) + b"-" + re.escape(last)
            before = b""
        elif byte == b"[" and pattern[at + 1 : at + 2] == b":":
            end = pattern.find(b"]", at + 2)
            if end < 0:
                return None
            if end - 1 < at + 2 or pattern[end - 1 : end] != b":":
                chars, before = chars + rb"\[", byte
            else:
                if (known := _CLASSES.get(pattern[at + 2 : end - 1])) is None:
                    return None
                chars, before, at = chars + known, b"", end
        else:
            if byte == b"\\":
                at += 1
                byte = pattern[at : at + 1]
                if not byte:
                    return None
            chars, before = chars + re.escape(byte), byte
        at += 1
    if not chars:  # of ranges that go down alone
        return (rb"[^/]" if negated else _NOTHING), at + 1
    return (rb"[^/" + chars + b"]" if negated else rb"(?!/)[" + chars + b"]"), at + 1
