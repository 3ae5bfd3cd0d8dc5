"""What the headers of a call say to a member, and those of a call or an answer that it sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moorage.bus.transport import Delivery
from moorage.calls.inputs import number_of
from moorage.calls.member import Call
from moorage.schemas.served import is_header, is_name
from moorage.schemas.service import (
    ENDPOINT,
    FAILED,
    FAIR_KEY,
    FAIR_KEY_CHARS_MAX,
    HOPS,
    OUTPUT,
    PRIORITY,
    PRIORITY_MAX,
    RESERVED_HEADERS,
    TIME_MS,
    WAIT_MS,
    WAIT_S_MAX,
    WAITED_MS,
    WHOLE_MS,
)

#: what callers may make a member remember of one call
_WAIT_MS_MAX: Final = round(WAIT_S_MAX * 1000)
#: headers of a call that a member reads, in small letters
_WAIT_MS, _TIME_MS, _PRIORITY, _OUTPUT = WAIT_MS.lower(), TIME_MS.lower(), PRIORITY.lower(), OUTPUT.lower()
_FAIR_KEY: Final = FAIR_KEY.lower()
_WAITED_MS, _HOPS, _WHOLE_MS = WAITED_MS.lower(), HOPS.lower(), WHOLE_MS.lower()
#: most characters of a program's own error in its header
_ERROR_CHARS_MAX: Final = 200


def read_into(call: Call, delivery: Delivery) -> None:
    """Have a call say what its headers do; those that are its caller's own go to the function. Raises ValueError for a
    number that is none."""
    own = call.headers
    for name, value in (delivery.headers or {}).items():
        known = name.lower()
        if known == _WAIT_MS:
            call.wait_ms, call.says_wait = min(_checked(WAIT_MS, value), _WAIT_MS_MAX), True
        elif known == _TIME_MS:
            call.time_ms = min(_checked(TIME_MS, value), _WAIT_MS_MAX)
        elif known == _WHOLE_MS:
            call.whole_ms = min(_checked(WHOLE_MS, value), _WAIT_MS_MAX)
        elif known == _OUTPUT:
            call.output_max = _checked(OUTPUT, value)
        elif known == _PRIORITY:
            call.priority = _checked(PRIORITY, value, PRIORITY_MAX)
        elif known == _FAIR_KEY:
            call.fair_key = value[:FAIR_KEY_CHARS_MAX]
        elif known == _WAITED_MS:
            call.waited_ms = _number(value)
        elif known == _HOPS:
            call.hops = _number(value)
        if known not in RESERVED_HEADERS:
            own[name] = value
    call.waited_ms = min(call.waited_ms, call.wait_ms)  # no member passes on a call that has waited for longer


def passed_on(call: Call, waited_ms: int) -> dict[str, str]:
    """Return the headers of a call for another member: the caller's that can be sent, and what it has been through."""
    own = {ENDPOINT: call.endpoint} if call.endpoint else {}
    if call.output_max is not None:
        own[OUTPUT] = str(call.output_max)
    theirs = {name: value for name, value in call.headers.items() if is_name(name)}
    waits = {WAIT_MS: str(call.wait_ms)} if call.says_wait else {}
    return {**theirs, **own, **waits, WAITED_MS: str(waited_ms), HOPS: str(call.hops)}


def foreign(headers: Mapping[str, str], without: str = "") -> dict[str, str]:
    """Return the headers that a program may give an answer, but for one."""
    return {
        name: value for name, value in headers.items() if is_header(name, value) and name.lower() != without.lower()
    }


def line(message: str) -> str:
    """Return the text of a program's own error as a header has it."""
    text = "".join(each if each.isprintable() else " " for each in message[:_ERROR_CHARS_MAX]).strip()
    return text or FAILED


def _checked(name: str, text: str, most: int | None = None) -> int:
    """Return the number that a caller has put into a header. Raises ValueError."""
    number = number_of(text)
    if number is None or (most is not None and number > most):
        allowed = "from 0 on" if most is None else f"from 0 to {most}"
        raise ValueError(f"{name} must be a whole number {allowed}, found {text[:40]!r}")
    return number


def _number(text: str) -> int:
    """Return a number of a header that members set, at most `_WAIT_MS_MAX`; 0 for what is none."""
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        return 0
    return min(int(text), _WAIT_MS_MAX)
