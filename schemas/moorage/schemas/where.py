"""Conditions about a worker's labels: `gpu.driver>=570`, `zone!=b`.

Labels are compared as versions by `>=`, `>`, `<=` and `<`: numbers between dots, from the left, as in 570.86 < 570.124.
A worker without the label, or with one that is no version, passes none of these; it passes each `!=`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from moorage.schemas.trouble import Trouble, quoted

#: labels that each worker has of itself, unless its settings have one of that name
HOST_NAME: Final = "host.name"
HOST_ARCH: Final = "host.arch"
GPU_MODEL: Final = "gpu.model"
GPU_DRIVER: Final = "gpu.driver"
GPU_CUDA: Final = "gpu.cuda"
#: a label that an operator gives workers: where they stand. The ranks of a gang stay in one site
SITE: Final = "site"
#: a label that an operator gives workers: of which pool a host is, where hosts come and go by pools
POOL: Final = "pool"
#: conditions of one request, and characters of a label's value
WHERE_MAX: Final = 64
VALUE_CHARS_MAX: Final = 256
_LABEL: Final = re.compile(r"[A-Za-z0-9_./-]{1,63}")
#: what a label may be, in words
LABEL_FORM: Final = "1 to 63 of A-Z, a-z, 0-9, _, ., / and -"
#: labels of which the ranks of a gang share the values
SAME_MAX: Final = 4
#: the sign of a condition that a worker passes with any value of the label; no request has it
ANY: Final = " with any value"
_CONDITION: Final = re.compile(r"([A-Za-z0-9_./-]{1,63})(>=|<=|!=|>|<)(.*)", re.DOTALL)
_WISH: Final = re.compile(r"([A-Za-z0-9_./-]{1,63})(>=|<=|!=|>|<|=)(.*)", re.DOTALL)
#: wishes of one request
PREFERS_MAX: Final = 8
_VERSION: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,7}")

Version = tuple[int, ...]


class Condition(NamedTuple):
    """What a label of a worker has to be."""

    label: str
    sign: str
    value: str | None  # None, with "=": no such label. No request has it

    @property
    def is_of_place(self) -> bool:
        """Whether it says in which place a gang is: it is asked of workers, and of no GPU's own labels. None of
        `Request.where` does."""
        return self.sign in ("=", ANY)

    def __str__(self) -> str:
        return f"{self.label}{self.sign}{self.value}" if self.sign != ANY else f"a label {self.label}"

    def holds(self, found: str | None) -> bool:
        """Return whether a worker passes whose label has this value; None: it has no such label."""
        if self.sign == "!=":
            return found != self.value
        if self.sign == "=":
            return found == self.value
        if self.sign == ANY:
            return found is not None
        has, asked = version_of(found or ""), version_of(self.value or "")
        if has is None or asked is None:
            return False
        if self.sign == ">=":
            return has >= asked
        if self.sign == "<=":
            return has <= asked
        return has > asked if self.sign == ">" else has < asked


def version_of(text: str) -> Version | None:
    """Return the numbers of a version, without zeros at its end; None for what is none."""
    found = _VERSION.match(text)
    if found is None or text[found.end() :][:1].isalnum():
        return None
    numbers = [int(each) for each in found[0].split(".")]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def is_label(text: str) -> bool:
    """Return whether a text may be the name of a worker's label."""
    return _LABEL.fullmatch(text) is not None


def is_condition(text: str) -> bool:
    """Return whether a text has the form of a condition, and not that of `LABEL=VALUE`."""
    return _CONDITION.fullmatch(text) is not None


def condition(text: str) -> Condition:
    """Return the condition of a text. Raises ValueError for what has not the form of one."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no condition")
    return Condition(*found.groups())


def wish(text: str) -> Condition:
    """Return the condition of a wish, which may also be `LABEL=VALUE`. Raises ValueError for what has not its form."""
    found = _WISH.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no wish")
    return Condition(*found.groups())


def where_trouble(texts: list[str]) -> Trouble | None:
    """Return what is wrong with the conditions of a request; None if nothing is."""
    return _trouble("where", texts, WHERE_MAX, _CONDITION, "LABEL!=VALUE, or LABEL>=VERSION with >=, >, <= or <")


def prefers_trouble(texts: list[str]) -> Trouble | None:
    """Return what is wrong with the wishes of a request; None if nothing is."""
    allowed = "LABEL=VALUE, LABEL!=VALUE, or LABEL>=VERSION with >=, >, <= or <"
    return _trouble("prefers", texts, PREFERS_MAX, _WISH, allowed)


def _trouble(name: str, texts: list[str], most: int, form: re.Pattern[str], allowed: str) -> Trouble | None:
    if len(texts) > most:
        return Trouble(name, f"at most {most} conditions", len(texts), f"0..{most}")
    for at, text in enumerate(texts):
        field = f"{name}[{at}]"
        found = form.fullmatch(text)
        if found is None:
            return Trouble(field, "a condition is a label, a sign and a value", quoted(text[:80]), allowed)
        label, sign, value = found.groups()
        if len(value) > VALUE_CHARS_MAX:
            return Trouble(field, "the value of a condition is too long", len(value), f"{VALUE_CHARS_MAX} characters")
        if sign not in ("!=", "=") and _VERSION.fullmatch(value) is None:
            return Trouble(field, f"{sign} compares versions", quoted(value[:80]), f"numbers as {label}{sign}570.86")
    return None
