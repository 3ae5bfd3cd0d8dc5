"""Explains why bytes do not decode as a frame: which field, what was found, what is allowed, what to do next.

msgspec reports this as a sentence with a path. Checks of moorage's own raise texts of the form `name must be what is
allowed, found what came`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from moorage.schemas.errors import Problem, Refused, problem
from moorage.schemas.job import Request, Run
from moorage.schemas.nearest import nearest

T = TypeVar("T")

_PATH: Final = re.compile(r" - at `(?P<path>[^`]*)`$")
_STEP: Final = re.compile(r"\.(?P<name>[A-Za-z_][A-Za-z0-9_]*)|\[[^]]*\]")
_OUR_RULE: Final = re.compile(
    r"(?P<name>[a-z_][A-Za-z0-9_./-]*) must (?P<verb>be |have |match |name |list )?"
    r"(?P<allowed>.*), found (?P<found>.*)$",
    re.DOTALL,
)
_UNKNOWN: Final = re.compile(r"unknown field `(?P<name>[^`]*)`")
_EXPECTED: Final = re.compile(r"Expected `(?P<allowed>[^`]*)`(?:, got `(?P<found>[^`]*)`)?")
_NO_CHOICE: Final = re.compile(r"Invalid enum value (?P<found>.*)", re.DOTALL)
_CHOICES_MAX: Final = 32
#: what to do about a bound of a request, by the beginning of its sentence: where its text alone shows no way on
_WAYS_ON: Final = {
    "argv must have at most": "put the words into a file among the job's files (--with); or run a replica for each line"
    " of a file: --each-line",
    "argv must have text": "leave it out: no program can get it",
    "env must have at most": "put them into a file among the job's files (--with), which the command reads",
    "env must have names": "name it as MY_VARIABLE; a function of a shell goes into a script among the job's files",
    "job must match": "name it with 1..64 letters, digits, - and _, as train-42",
    "after must match": "name each job by its id in full, as train-42; another end than SUCCEEDED counts with"
    " {'job': 'train-42', 'when': 'any'}, --after train-42:any",
    "after must name at most": "let it start after one job that starts after some of them",
}
#: how a field of a request is written that got a value of another type
_WRITTEN: Final = {
    "$.gpu": '{"count": 2, "model": "H100"}',
    "$.run": '{"argv": ["nvidia-smi", "-L"]}',
    "$.run.argv": '["sh", "-c", "echo hello"]',
    "$.run.env": '{"SEED": "7"}',
    "$.after": '["train-42"]',
    "$.labels": '{"team": "vision"}',
    "$.resources": '{"cpu_milli": 4000, "memory_mib": 16384}',
}
#: names that a field of a request has elsewhere
_CALLED: Final = {
    "name": "job",
    "id": "job",
    **dict.fromkeys(("command", "cmd", "args"), "run.argv"),
    **dict.fromkeys(("timeout", "time_limit"), "run.timeout_s"),
    "cpu": "resources.cpu_milli",
    "memory": "resources.memory_mib",
}
#: how the other bounds are kept, by the verb of their sentence
_KEPT: Final = {"be ": "give", "have ": "let it have", "match ": "write it as", "name ": "name", "list ": "list"}
#: how msgspec's paths name the value of any key
ANY_KEY: Final = "[...]"
_KEY_CHARS_MAX: Final = 80
#: the room of the frames that `moorage schema` shows
_FRAMES: Final = "moorage.schemas.frames."


def is_unknown_field(told: Problem) -> bool:
    """Return whether a `Problem` of `explain_decode_error` is about a field that the type does not have."""
    return _UNKNOWN.search(told.message) is not None


def explain_decode_error(error: Exception, kind: Any = None, next_step: str = "", plain: Any = None) -> Problem:
    """Return an error of msgspec as a `Problem`: which field, what was found, what is allowed.

    `kind` is the type that was to be read. `next_step` is what to do now, for types other than a request. `plain` is
    what was to be read, as plain values: with it, the error names the key of an object whose value is wrong.
    """
    text = str(error)
    path = _PATH.search(text)
    field = path["path"] if path else "$"
    message = text[: path.start()] if path else text
    key = _wrong_key(field, kind, plain)
    seen = _EXPECTED.search(message) or _OUR_RULE.match(message) or _NO_CHOICE.match(message)
    allowed, near, rule = "", "", None
    if seen is not None:
        allowed = seen["allowed"] if "allowed" in seen.re.groupindex else ", ".join(_choices(kind, field))
    if (unknown := _UNKNOWN.search(message)) is not None:
        near = _nearest(unknown["name"], kind, field)
        field = f"{field}.{unknown['name']}"
    elif (rule := _OUR_RULE.match(message)) is not None:
        whole, _, part = rule["name"].partition(".")  # `share.memory_mib` at `$.gpu.share` is `$.gpu.share.memory_mib`
        field = f"{field}.{part if part and field.endswith('.' + whole) else rule['name']}"
    if key:
        message, field = f"{key}: {message}", field.replace(ANY_KEY, f".{key}", 1)
    if near:
        next_step = f"the nearest field is {near}"
    elif kind is Request and unknown is None and rule is None and field in _WRITTEN:
        next_step = f"write it as {_WRITTEN[field]}"
    elif field.endswith("_s") and allowed.startswith("float"):
        next_step = "say it in seconds, as a number: 3600 is an hour"
    return problem(
        "invalid-argument",
        message,
        field=field,
        found=seen["found"] if seen is not None and seen["found"] else None,
        allowed=allowed,
        next=next_step or ("" if rule is None else _kept(rule)) or _schema_of(kind),
    )


def _kept(rule: re.Match[str]) -> str:
    """Return how a value keeps one of moorage's own bounds."""
    for beginning, way_on in _WAYS_ON.items():
        if rule[0].startswith(beginning):
            return way_on
    allowed = rule["allowed"]
    return "leave it out" if allowed.startswith("left out") else f"{_KEPT.get(rule['verb'], 'give')} {allowed}"


def asked_as(kind: type[T], arguments: object, next_step: str = "") -> T:
    """Return decoded arguments as this type, checked. Raises `Refused`, which names the wrong field."""
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise Refused(explain_decode_error(error, kind, next_step, arguments)) from None


def _wrong_key(field: str, kind: Any, plain: Any) -> str:
    """Return the first key of an object whose value msgspec refuses; "" if it cannot be told.

    msgspec does not name it, so this converts the beginning of the object, of half the length and so on.
    """
    before, found, _ = field.partition(ANY_KEY)
    names = [step["name"] for step in _STEP.finditer(before)]
    above: Any = plain
    if not found or None in names:
        return ""
    for name in names:
        above = above.get(name) if isinstance(above, dict) else None
    if not isinstance(above, dict):
        return ""
    keys = list(above)

    def is_refused(count: int) -> bool:
        part: Any = {key: above[key] for key in keys[:count]}
        if names:
            part = _replaced(plain, names, part)
        try:
            msgspec.convert(part, kind)
        except msgspec.ValidationError as error:
            return str(error).endswith(f"`{field}`")
        except (RecursionError, TypeError, ValueError, OverflowError):
            pass
        return False

    count = bisect_left(range(len(keys) + 1), True, key=is_refused)
    return str(keys[count - 1])[:_KEY_CHARS_MAX] if 0 < count <= len(keys) else ""


def _replaced(plain: dict[str, Any], names: list[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested objects with another value at this path."""
    first, *rest = names
    return {**plain, first: _replaced(plain[first], rest, value) if rest else value}


def _schema_of(kind: Any) -> str:
    """Return the command that shows every field of this type; "" if there is none."""
    if kind in (None, list, Request):  # a list that cannot be read is a batch of requests
        return "moorage schema request has every field"
    tag = getattr(getattr(kind, "__struct_config__", None), "tag", None)
    if tag is not None and kind.__module__.startswith(_FRAMES):
        return f"moorage schema {tag} has every field"
    return ""


def _nearest(name: str, kind: Any, path: str) -> str:
    """Return the field of the object at a path whose name is most similar to this unknown one; "" if none is
    similar."""
    known = {
        field.encode_name for part in _at(kind, path) if isinstance(part, inspect.StructType) for field in part.fields
    }
    if kind is Request and path == "$":
        run = msgspec.structs.fields(Run)
        if meant := _CALLED.get(name) or next((f"run.{one.encode_name}" for one in run if one.encode_name == name), ""):
            return meant
    return nearest(name, sorted(known))


def _choices(kind: Any, path: str) -> list[str]:
    """Return the words that are allowed at a path; none if it is not a choice between a few words."""
    words = [str(word) for part in _at(kind, path) if isinstance(part, inspect.LiteralType) for word in part.values]
    return words if len(words) <= _CHOICES_MAX else []


@lru_cache(128)
def _at(kind: Any, path: str) -> tuple[inspect.Type, ...]:
    """Return what is allowed at a path of a type; nothing if that cannot be told."""
    if kind is None:
        return ()
    found = tuple(_parts(msgspec.inspect.type_info(kind)))
    for step in _STEP.finditer(path):
        found = tuple(part for each in found for part in _below(each, step["name"]))
    return found


def _below(part: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """Yield what is allowed in the field `name`; if that is None, in each item of a list or object."""
    if name is not None and isinstance(part, inspect.StructType):
        for field in part.fields:
            if field.encode_name == name:
                yield from _parts(field.type)
    elif name is None and isinstance(part, inspect.DictType):
        yield from _parts(part.value_type)
    elif name is None and isinstance(part, inspect.ListType):
        yield from _parts(part.item_type)


def _parts(part: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(part, inspect.UnionType):
        for each in part.types:
            yield from _parts(each)
    else:
        yield part
