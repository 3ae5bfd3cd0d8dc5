"""Turns bytes into frames and back, as JSON or msgpack. The first byte tells which, and an answer has the question's
encoding.

A msgpack map or array begins with a byte that no JSON text begins with; everything else is read, and answered, as JSON.
Whatever the bytes are, decoding raises nothing but `Refused`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_origin

import msgspec

from moorage.schemas.decode_errors import ANY_KEY, explain_decode_error, is_unknown_field
from moorage.schemas.errors import Refused, refuse
from moorage.schemas.frames import VERSION
from moorage.schemas.job import Request

T = TypeVar("T")
_S = TypeVar("_S", bound=msgspec.Struct)

REQUEST_BYTES_MAX: Final = 64 * 1024
FRAME_BYTES_MAX: Final = 900 * 1024
NESTING_MAX: Final = 64

#: the first byte of a msgpack map or array, of up to 15 parts or with their number in 2 or 4 bytes
_MSGPACK_FIRST: Final = frozenset((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
#: a step of a field's path: a name, or a position in brackets
_STEP: Final = re.compile(r"[^.\[\]$]+|\[\d+\]")
_PATH_CHARS_MAX: Final = 200
_NUMBERS: Final = f"{-(2**63)}..{2**64 - 1}"
_json_encode: Final = msgspec.json.Encoder().encode
_msgpack_encode: Final = msgspec.msgpack.Encoder().encode


def is_json(payload: bytes) -> bool:
    """Return whether a payload is JSON, by its first byte; otherwise it is msgpack. Empty payloads and single values
    count as JSON."""
    return not payload or payload[0] not in _MSGPACK_FIRST


def encode(frame: object, *, json: bool = True) -> bytes:
    """Return a frame as JSON (default) or msgpack. Raises UnicodeEncodeError for text that is not UTF-8."""
    return _json_encode(frame) if json else _msgpack_encode(frame)


class Decoder(Generic[T]):
    """Decodes one type from both encodings. Make it once and use it often. A payload over `bytes_max` is refused
    unread.

    JSON has numbers of any size, msgpack has 64 bits. A number that does not fit is refused here, so that whatever was
    decoded can be answered and recorded. With `from_leader` this is not checked: a leader sends no such numbers.
    """

    def __init__(self, kind: type[T] | Any, bytes_max: int = FRAME_BYTES_MAX, *, from_leader: bool = False) -> None:
        self._kind = kind
        self._from_leader = from_leader
        self._json: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._msgpack: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._bytes_max = bytes_max

    def __call__(self, payload: bytes) -> T:
        """Decode and validate. Raises `Refused` with invalid-argument, too-large or unknown-version."""
        if len(payload) > self._bytes_max:
            raise _too_large(len(payload), self._bytes_max, self._kind)
        try:
            if not payload or payload[0] not in _MSGPACK_FIRST:
                frame, checked = self._json.decode(payload), self._from_leader
            else:
                frame, checked = self._msgpack.decode(payload), True
        except msgspec.MsgspecError as error:
            raise Refused(explain_decode_error(error, self._kind, plain=_plain(error, payload))) from None
        except RecursionError:
            raise _too_deep() from None
        except (ValueError, OverflowError, UnicodeDecodeError) as error:
            raise refuse("invalid-argument", f"the frame cannot be read: {error}") from None
        version = getattr(frame, "v", VERSION)
        if version != VERSION:
            raise refuse(
                "unknown-version",
                "the frame is of another version of the protocol",
                field="$.v",
                found=version,
                allowed=str(VERSION),
                next="use a release of moorage that speaks this version",
            )
        if not checked:
            _check_numbers(frame)
        return frame


decode_request: Final = Decoder[Request](Request, REQUEST_BYTES_MAX)


#: keys of a JSON object, and texts before a colon
_KEYS: Final = re.compile(rb'"([^"\\]*)"\s*:')


def named_twice(payload: bytes) -> str:
    """Return a key that one object of a JSON text has twice, of which decoders take the last; "" if there is none.

    It reads the text as objects only if some key stands in it twice, or is escaped.
    """
    if not is_json(payload):
        return ""
    keys = _KEYS.findall(payload)
    if len(keys) == len(set(keys)) and b"\\" not in payload:
        return ""
    import json

    class Twice(Exception):
        """A key is there twice."""

    def once(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(names) > len(set(names)):
            raise Twice(next(name for name in names if names.count(name) > 1))

    try:
        json.loads(payload, object_pairs_hook=once)
    except Twice as found:
        return str(found)
    except (ValueError, RecursionError):  # the decoder has the word for that
        pass
    return ""


def refuse_twice(payload: bytes) -> None:
    """Raise `Refused` for a key that one object of a JSON text has twice, of which the last would count."""
    if key := named_twice(payload):
        told = f"the request has {key[:80]} twice in one object"
        raise refuse("invalid-argument", told, field=f"$.{key[:80]}", next="put both into one")


def decode_accepted(body: bytes) -> Request:
    """Return the request of a job that a scheduler has accepted, without the fields that only its release knows.

    Nothing may start by it, as these fields are left out. Raises `Refused` for any other fault.
    """
    try:
        return decode_request(body)
    except Refused as refused:
        if not is_unknown_field(refused.problem):
            raise
        unread = refused
    plain = (msgspec.json if is_json(body) else msgspec.msgpack).decode(body)
    while _drops_unknown(plain, unread):
        try:
            return msgspec.convert(plain, Request)
        except msgspec.ValidationError as error:
            unread = Refused(explain_decode_error(error, Request))
    raise unread


def _drops_unknown(plain: Any, refused: Refused) -> bool:
    """Remove the unknown field that this refusal names; return False if it is about something else."""
    if not is_unknown_field(refused.problem):
        return False
    *path, name = _STEP.findall(refused.problem.field)
    try:
        for step in path:
            plain = plain[int(step[1:-1]) if step.startswith("[") else step]
        del plain[name]
    except (LookupError, TypeError, ValueError):
        return False
    return True


def same_request(one: bytes, other: bytes) -> bool:
    """Return whether two request bodies have one `identity`, whatever their encoding and order of keys.

    Raises `Refused` if they differ and one cannot be decoded.
    """
    return one == other or _identified(decode_request(one)) == _identified(decode_request(other))


def canonical(request: Request) -> bytes:
    """Return the canonical form: msgpack of all fields in sorted order, so that equal requests have equal bytes."""
    return msgspec.msgpack.encode(_with_its_defaults(request), order="sorted")


def identity(request: Request) -> bytes:
    """Return the canonical form of what a request asks for.

    It leaves out `events`, which says where events are sent, `on_no_match`, which is about the fleet of that time, and
    `person`, who sent it.
    """
    return canonical(_identified(request))


def _with_its_defaults(struct: _S) -> _S:
    """Return a struct in which each value that equals its field's default is the default itself.

    msgspec leaves a default out if the value is the same object, and a number or text that was read is another one.
    """
    changed: dict[str, object] = {}
    for name, default in _read_apart(type(struct)):
        value = getattr(struct, name)
        if isinstance(value, msgspec.Struct):
            if (same := _with_its_defaults(value)) is not value:
                changed[name] = same
        elif value is not default and value == default:
            changed[name] = default
    return msgspec.structs.replace(struct, **changed) if changed else struct


@cache
def _read_apart(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    """Return the fields of a struct whose default is read as another object, and those of structs with such fields."""
    found = []
    for field in msgspec.structs.fields(kind):
        default = field.default
        if isinstance(default, int | float | str):
            read = msgspec.msgpack.decode(msgspec.msgpack.encode(default), type=field.type)
            if read is not default:
                found.append((field.name, default))
        elif any(_read_apart(part) for part in _structs_of(field.type)):
            found.append((field.name, default))
    return tuple(found)


def _structs_of(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs that a field of this type can hold itself, outside lists and dicts."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    elif get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from _structs_of(part)


def _identified(request: Request) -> Request:
    if request.events == "job" and request.on_no_match == "wait" and request.person is None:
        return request
    return msgspec.structs.replace(request, events="job", on_no_match="wait", person=None)


def split_array(payload: bytes) -> list[msgspec.Raw]:
    """Return the elements of a JSON or msgpack array, each still encoded, as slices of `payload`. Raises `Refused`."""
    if len(payload) > FRAME_BYTES_MAX:
        raise _too_large(len(payload), FRAME_BYTES_MAX)
    try:
        if is_json(payload):
            return _json_array.decode(payload)
        return _msgpack_array.decode(payload)
    except msgspec.MsgspecError as error:
        raise Refused(explain_decode_error(error, list)) from None
    except RecursionError:
        raise _too_deep() from None


def _plain(error: Exception, payload: bytes) -> object:
    """Return a payload as plain values, to name the key that an error does not name; None for other errors."""
    if ANY_KEY not in str(error):
        return None
    try:
        return msgspec.json.decode(payload) if is_json(payload) else msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return None


def _check_numbers(frame: object) -> None:
    try:
        _msgpack_encode(frame)
    except OverflowError:
        field, found = _widest(msgspec.to_builtins(frame))
        raise refuse(
            "invalid-argument",
            "a number does not fit into 64 bits",
            field=field,
            found=found,
            allowed=_NUMBERS,
            next="write it as a text, in quotes",
        ) from None


def _widest(plain: object) -> tuple[str, str]:
    """Return the path of a number of more than 64 bits, and `a larger one` or `a smaller one`; ("$", "") if there is
    none."""
    left: list[tuple[str, object]] = [("$", plain)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[{at}]", inner) for at, inner in enumerate(value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            return path[:_PATH_CHARS_MAX], "a larger one" if value > 0 else "a smaller one"
    return "$", ""


def _too_large(size: int, bytes_max: int, kind: Any = None) -> Refused:
    if kind is not Request:
        return refuse("too-large", "the frame is too large", found=size, allowed=f"{bytes_max} bytes")
    way_on = "put long words and values into a file among the job's files (--with), which the command reads"
    return refuse("too-large", "the request is too large", found=size, allowed=f"{bytes_max} bytes", next=way_on)


def _too_deep() -> Refused:
    return refuse("too-large", "the frame is nested too deeply", allowed=f"{NESTING_MAX} levels")


_json_array: Final = msgspec.json.Decoder(list[msgspec.Raw])
_msgpack_array: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
