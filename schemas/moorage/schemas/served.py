"""What a Python function of a service may return or raise beside a plain value: headers, and errors of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from moorage.schemas.service import OWN_CODES, OWN_HEADERS_BYTES_MAX, RESERVED_HEADERS

F = TypeVar("F", bound=Callable[..., Any])
#: the mark of `endpoint`
ENDPOINT_MARK: Final = "__moorage_endpoint__"
#: what can be the name of a header, as in HTTP: nats-py sends no other
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
NAME_ALLOWED: Final = "letters, digits and !#$%&'*+-.^_`|~"


def endpoint(method: F) -> F:
    """Mark a method of a served class: callers of the service `text` call its method `embed` as `text.embed`."""
    setattr(method, ENDPOINT_MARK, True)
    return method


class Answer(msgspec.Struct, frozen=True):
    """The answer of a service with its headers. A function returns or yields one to set headers; `Service.answer`
    returns one."""

    value: Any
    headers: Mapping[str, str] = {}


class CallError(Exception):
    """An error of the service's own, which a function raises and its caller gets, without a traceback in the log.

    `code` is 400..599, as in HTTP: what is 500 or more is the service's fault. `headers` go with the answer. Raises
    ValueError for another code, and for headers that an answer cannot have.
    """

    def __init__(self, code: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(code, message)
        if code not in OWN_CODES:
            raise ValueError(f"the code of a CallError must be {OWN_CODES[0]}..{OWN_CODES[-1]}, found {code!r}")
        self.code = code
        self.message = message
        self.headers = {} if headers is None else checked_headers(headers)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the headers of an answer. Raises ValueError for one that an answer cannot have."""
    for name, value in headers.items():
        if not is_header(name, value):
            raise ValueError(
                f"{name!r} cannot be a header of an answer with this value: the name must be of {NAME_ALLOWED} and "
                "none of moorage's own, the value one line of text"
            )
    if wrong := too_large(headers):
        raise ValueError(wrong)
    return dict(headers)


def too_large(headers: Mapping[str, str], of: str = "the answer") -> str:
    """Return what is wrong with the size of the headers of an answer, or of a call; "" if nothing is."""
    size = sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())
    if size <= OWN_HEADERS_BYTES_MAX:
        return ""
    return f"the headers of {of} have {size} bytes, allowed are {OWN_HEADERS_BYTES_MAX}"


def is_name(name: str) -> bool:
    """Return whether a header may have this name."""
    return _NAME.fullmatch(name) is not None


def is_header(name: object, value: object) -> bool:
    """Return whether an answer may have this header: it is none of moorage's own, and breaks no message."""
    if not isinstance(name, str) or not isinstance(value, str) or name.lower() in RESERVED_HEADERS:
        return False
    return is_name(name) and value.isprintable()
