"""Read a YAML text into plain values as container engines do, which read JSON the same way.

Source: gopkg.in/yaml.v2 in its strict form, below sigs.k8s.io/yaml. Its scanner is a copy of libyaml's, which PyYAML
uses too. So this module takes the events of PyYAML, and makes values of them by the rules of yaml.v2: the first
document counts, a key may not be there twice (not by a merge either), `0:1` is a text, and `y` is true.
A PyYAML that was built without libyaml refuses tabs between the words of JSON, and nothing else of what engines read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

NODES_MAX: Final = 400_000
DEPTH_MAX: Final = 100
_MERGE: Final = "<<"
_TRUE: Final = frozenset(["y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"])
_FALSE: Final = frozenset(["n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"])
_NULL: Final = frozenset(("", "~", "null", "Null", "NULL"))
_OCTAL: Final = re.compile(r"[-+]?0[0-7]+")
_INT: Final = re.compile(r"[-+]?([1-9][0-9]*|0|0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+)")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL: Final = {
    f"{sign}.{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in ("inf", "Inf", "INF")
} | {f".{word}": float("nan") for word in ("nan", "NaN", "NAN")}
#: an escape of JSON that these engines do not know
_SLASH: Final = re.compile(r"(?<!\\)(\\\\)*\\/")
#: tags whose scalars have the value that they have without a tag
_CORE: Final = frozenset(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null", "timestamp"))


class YamlError(ValueError):
    """A text that the engines do not read."""


def load(raw: bytes) -> Any:
    """Return the value of the first document: None, a bool, int, float, str, list, or a dict whose keys are texts.

    Raises YamlError.
    """
    import yaml  # imported late, because most workers have no specs

    try:
        # not the composer: libyaml's recurses, and a text with many brackets would end the process
        return _Document(raw, yaml.parse(raw, getattr(yaml, "CSafeLoader", yaml.SafeLoader))).value()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise YamlError(f"no YAML: {error}") from None


class _Mapping(dict[Any, Any]):
    """A mapping by type and value of its keys: a number and the text of it are two keys."""

    def put(self, more: _Mapping) -> None:
        if twice := next((key for key in more if key in self), None):
            raise YamlError(f"it has the same key twice: {text_of(twice[1])}")
        self.update(more)


class _Document:
    """The first document of a text, made from its events.

    An alias is the value of its anchor once more. It counts as all of that value, so NODES_MAX bounds what a reader of
    the whole meets.
    """

    def __init__(self, raw: bytes, events: Iterator[Any]) -> None:
        self._events = events
        self._text = raw.decode(errors="replace") if rb"\/" in raw else ""
        self._count = 0
        #: by name the value of an anchor and how much it counts; None while it is being made
        self._anchors: dict[str, tuple[Any, int] | None] = {}

    def value(self) -> Any:
        for event in self._events:
            if type(event).__name__ not in ("StreamStartEvent", "StreamEndEvent", "DocumentStartEvent"):
                return _with_texts(self._of(event, 0))
        return None

    def _of(self, event: Any, depth: int) -> Any:
        kind, before = type(event).__name__, self._count
        if depth > DEPTH_MAX:
            raise YamlError(f"it is nested deeper than {DEPTH_MAX}")
        if kind == "AliasEvent":
            if (known := self._anchors.get(event.anchor)) is None:
                raise YamlError(f"the anchor {event.anchor[:80]} is unknown, or contains itself")
            self._add(known[1])
            return known[0]
        self._add(1)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if kind == "ScalarEvent":
            found = self._scalar(event)
        elif kind == "SequenceStartEvent":
            found = [self._of(each, depth + 1) for each in self._until("SequenceEndEvent")]
        else:
            found = self._mapping(depth + 1)
        if event.anchor is not None:
            self._anchors[event.anchor] = (found, self._count - before)
        return found

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > NODES_MAX:
            raise YamlError(f"it has more than {NODES_MAX} values, those of its aliases included")

    def _until(self, last: str) -> Iterator[Any]:
        while type(event := next(self._events)).__name__ != last:
            yield event

    def _mapping(self, depth: int) -> _Mapping:
        found = _Mapping()
        for event in self._until("MappingEndEvent"):
            is_merge = type(event).__name__ == "ScalarEvent" and event.implicit[0] and event.value == _MERGE
            key = self._of(event, depth)
            value = self._of(next(self._events), depth)
            if not is_merge:
                if key is None or isinstance(key, list | _Mapping):
                    raise YamlError("a key must be a text")
                found.put(_Mapping({(type(key), key): value}))
                continue
            for each in reversed(value) if isinstance(value, list) else [value]:
                if not isinstance(each, _Mapping):
                    raise YamlError("only a mapping can be merged into another one")
                found.put(each)
        return found

    def _scalar(self, event: Any) -> Any:
        written = self._text[event.start_mark.index : event.end_mark.index] if event.style == '"' else ""
        if _SLASH.search(written):
            raise YamlError(r"the engines do not know the escape \/")
        return _plain(event.value) if event.implicit[0] or event.tag in _CORE else event.value


def _with_texts(value: Any) -> Any:
    """Return a value with the texts of all keys."""
    if isinstance(value, list):
        return [_with_texts(each) for each in value]
    if isinstance(value, _Mapping):
        return {text_of(key): _with_texts(each) for (_, key), each in value.items()}
    return value


def _plain(text: str) -> Any:
    """Return the value of a text without quotes."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text in _SPECIAL:
        return _SPECIAL[text]
    bare = text.replace("_", "") if text[0] in "+-0123456789" else text
    if _OCTAL.fullmatch(bare):
        return int(bare, 8)
    if _INT.fullmatch(bare) and -(1 << 63) <= (whole := int(bare, 0)) < 1 << 64:
        return whole
    return float(bare) if _FLOAT.fullmatch(bare) else text


def text_of(value: bool | int | float | str) -> str:
    """Return what the engines make of a scalar where a text is due."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value).removesuffix(".0") if abs(value) < 1e6 else f"{value:e}"
    return str(value)
