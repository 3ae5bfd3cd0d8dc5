"""A call of a function that a service offers to its workers: the names of its request, and its result as bytes.

A small result is also sent to the waiting clients, as a line on the job's log subject.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from moorage.schemas.arrays import plain_number
from moorage.schemas.errors import refuse
from moorage.schemas.frames import VERSION, ResultLine
from moorage.schemas.passed_on import CHECKPOINT
from moorage.schemas.subjects import Subjects

HANDLER_NAME: Final = re.compile(r"[a-z0-9_.-]{1,48}")
#: the name of the driver, and the one key of its part of a request's `driver_config`
DRIVER: Final = "handler"
INPUT_KEY: Final = "input"
#: largest result; a larger one belongs in a store of the service's own, and the result should name the place
RESULT_BYTES_MAX: Final = 64 * 1024 * 1024
#: a result up to this size is also sent on the log subject
INLINE_BYTES_MAX: Final = 32 * 1024
#: a result up to this size is stored together with others
TOGETHER_BYTES_MAX: Final = 16 * 1024
#: deepest nesting of arrays and objects in a result that is stored together with others
NESTED_MAX: Final = 200
_JSON: Final = "application/json"
NOT_FINITE: Final = "NaN or infinity, which JSON cannot hold"
#: header of a `kept_object`: when its job was accepted, ms since 1970
ACCEPTED_HEADER: Final = "Moorage-Accepted"

_encode: Final = msgspec.json.Encoder(enc_hook=plain_number).encode
_decode_raw: Final = msgspec.json.Decoder(msgspec.Raw).decode


class Result(msgspec.Struct, frozen=True):
    """A function's return value as bytes; `content_type` says which Python type it had."""

    content_type: str
    data: bytes


def encode_result(value: object) -> Result:
    """Return a result from a value: `bytes` as they are, `str` as UTF-8, other values as JSON.

    Raises Refused for a value that is none of these, that contains a float that is not finite, or that is too large.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        result = Result("application/octet-stream", bytes(value))
    elif isinstance(value, str):
        result = Result("text/plain; charset=utf-8", value.encode())
    else:
        try:
            result = Result(_JSON, _encode(value))
            if place := null_place("result", value, result.data):
                raise refuse("invalid-argument", f"{place} is {NOT_FINITE}: return it as text, or leave it out")
            if len(result.data) <= INLINE_BYTES_MAX:
                _decode_raw(result.data)  # an invalid `msgspec.Raw` in it would spoil the lines of other results
        except (TypeError, msgspec.MsgspecError) as error:
            raise refuse("invalid-argument", f"the result is neither bytes nor text nor JSON: {error}") from None
    if len(result.data) > RESULT_BYTES_MAX:
        raise refuse("too-large", f"a result has at most {RESULT_BYTES_MAX} bytes", found=len(result.data))
    return result


def _plain(value: object) -> object:
    """Give nothing for a `msgspec.Raw`: it is JSON already, and contains no float."""
    return None if isinstance(value, msgspec.Raw) else plain_number(value)


def null_place(place: str, value: object, encoded: bytes) -> str:
    """Return the place of a float in a value that stands as null in its encoded JSON, as `not_finite` names it."""
    return not_finite(place, msgspec.to_builtins(value, enc_hook=_plain)) if b"null" in encoded else ""


def not_finite(place: str, value: object) -> str:
    """Return the place of a float in a plain value that the encoder would write as null: NaN or an infinity.

    `place` is the value's own name; the answer is such as `result['loss'][0]`, and "" if all floats are finite.
    """
    waiting = [(place, value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return place
        if isinstance(value, dict):
            waiting.extend((f"{place}[{key!r}]", each) for key, each in value.items() if _may_be_unfit(each))
        elif isinstance(value, list | tuple):
            waiting.extend((f"{place}[{at}]", each) for at, each in enumerate(value) if _may_be_unfit(each))
    return ""


def _may_be_unfit(value: object) -> bool:
    return not math.isfinite(value) if isinstance(value, float) else isinstance(value, dict | list | tuple)


def is_json(content_type: str) -> bool:
    """Return whether a content type says JSON: `application/json` or one that ends with `+json`, with parameters or
    without, in small letters or large ones."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == _JSON or kind.endswith("+json")


def is_text(content_type: str) -> bool:
    return content_type[:5].lower() == "text/"


def decode_result(result: Result) -> Any:
    """Return the function's value from a result: bytes, text, or decoded JSON.

    Raises ValueError for invalid content.
    """
    if is_json(result.content_type):
        return msgspec.json.decode(result.data)
    return result.data.decode() if is_text(result.content_type) else result.data


def inline(result: Result) -> object:
    """Return a small result's value for the line on the log subject: raw JSON, text, or bytes in base64.

    None if it is larger than `INLINE_BYTES_MAX` or nested too deeply.
    """
    if len(result.data) > INLINE_BYTES_MAX or _is_deep(result):
        return None
    if is_json(result.content_type):
        return msgspec.Raw(result.data)
    return result.data.decode() if is_text(result.content_type) else base64.b64encode(result.data).decode()


def decode_inline(content_type: str, value: Any) -> Any:
    """Return the function's value from the value that `inline` gave."""
    return base64.b64decode(value) if content_type == "application/octet-stream" else value


def goes_together(result: Result) -> bool:
    """Return whether a result is stored in one message with others."""
    return len(result.data) <= TOGETHER_BYTES_MAX and not _is_deep(result)


def _is_deep(result: Result) -> bool:
    """Return whether JSON is nested so deeply that a reader's stack may be too small for it."""
    data = result.data
    if not is_json(result.content_type) or data.count(b"[") + data.count(b"{") <= NESTED_MAX:
        return False
    level = [msgspec.json.decode(data)]
    for _ in range(NESTED_MAX):
        level = [each for v in level if isinstance(v, list | dict) for each in (v.values() if type(v) is dict else v)]
    return any(isinstance(value, list | dict) for value in level)


def line_of(name: str, result: Result) -> bytes:
    """Return a `ResultLine` as JSON, with the value if `inline` gives one."""
    small = inline(result)
    return _encode(ResultLine(name, len(result.data), result.content_type, msgspec.UNSET if small is None else small))


def together(lines: Sequence[bytes]) -> bytes:
    """Return `Results` as JSON, with these lines."""
    return b'{"kind":"results","v":%d,"results":[%b]}' % (VERSION, b",".join(lines))


def result_bucket(prefix: str, tenant: str) -> str:
    """Return the name of the tenant's bucket; its stream is `OBJ_<bucket>`."""
    return Subjects(prefix).result_bucket(tenant)


def kept_object(job: str, replica: int) -> str:
    """Return the other name of the object with the files that a replica kept which has SUCCEEDED."""
    return f"kept.{job}.{replica}"


def is_earlier(headers: Mapping[str, Sequence[str]], accepted_ms: int) -> bool:
    """Return whether a `kept_object` with these headers is of an earlier job than the one that was accepted then."""
    try:  # each client of the tenant can write an object
        return 0 < int(headers.get(ACCEPTED_HEADER, ["0"])[0]) < accepted_ms
    except (ValueError, IndexError):
        return True


#: variable with the path of a file that a job touches to have its checkpoint stored at once, and that file's name below
#: the attempt's folder; it is removed once that is so
CHECKPOINT_NOW_VARIABLE: Final = "MOORAGE_CHECKPOINT_NOW"
CHECKPOINT_NOW_FILE: Final = ".moorage-checkpoint-now"

#: variable with the path of a file to which a job appends what it reports, a line of JSON each, and that file's name
#: below the attempt's folder
REPORT_VARIABLE: Final = "MOORAGE_REPORT"
REPORT_FILE: Final = ".moorage-report"


def reported_object(job: str, replica: int, fence: int) -> str:
    """Return the name of the object with the last rows that an attempt reported, as JSON."""
    return f"reported.{job}.{replica}.{fence}"


def checkpoint_object(job: str, accepted_ms: int, replica: int, attempt: int) -> str:
    """Return the name of the object with the checkpoint that an attempt left, in the tenant's bucket of files.

    A later job of that id has another `accepted_ms`, and so none of its checkpoints.
    """
    return f"{CHECKPOINT}{job}.{accepted_ms}.{replica}.{attempt}"


def set_objects(checkpoint: str) -> list[str]:
    """Return the names of the manifests of an attempt's sets, beside its `checkpoint_object`: two for those that are
    stored in turn while it runs, a third one for ranks of gangs, and the last one for its end."""
    return [f"{checkpoint}.{place}" for place in ("a", "b", "c", "end")]


def over_object(checkpoint: str) -> str:
    """Return the name of the object that says that a rank of a gang has ended well, beside its `checkpoint_object`."""
    return f"{checkpoint}.over"


#: header of an `over_object`: the ranks of the gang. Once all of one attempt have such an object, no set is needed
RANKS_HEADER: Final = "Moorage-Ranks"


def result_object(job: str, replica: int, fence: int) -> str:
    """Return the object's name; `fence` is in the event that made the replica RUNNING and SUCCEEDED."""
    return f"{job}.{replica}.{fence}"


def rescued_object(job: str, replica: int, fence: int, path: str) -> str:
    """Return the name of the object with what an attempt has left at this path of its folder, kept or not."""
    of = f".{hashlib.sha256(path.encode()).hexdigest()[:16]}" if path else ""
    return f"rescued.{job}.{replica}.{fence}{of}"
