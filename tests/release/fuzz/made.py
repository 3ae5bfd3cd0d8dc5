"""Values of any message type, from its annotations: so every type that there is, or comes to be, is fuzzed."""

from __future__ import annotations

import functools
import random
from typing import Any, Final

from msgspec import inspect

DEPTH_MAX: Final = 6
_WORDS: Final = ("a", "w1", "acme", "train-42", "GPU-0", "nvidia", "process", "exclusive", "H100", "1.0", "", "x" * 64)


def made(rng: random.Random, kind: Any) -> Any:
    """Plain data (as JSON and msgpack have it) that a decoder of `kind` takes, or nearly: its own rules are unknown."""
    return _made(rng, _info(kind), 0)


_info: Final = functools.cache(inspect.type_info)


def _made(rng: random.Random, kind: inspect.Type, depth: int) -> Any:
    match kind:
        case inspect.StructType():
            return _struct(rng, kind, depth)
        case inspect.UnionType(types=types):
            return _made(rng, rng.choice(types), depth + 1)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item) | inspect.SetType(item_type=item):
            many = 0 if depth > DEPTH_MAX else rng.choice((0, 1, 1, 3))
            return [_made(rng, item, depth + 1) for _ in range(many)]
        case inspect.TupleType(item_types=items):
            return [_made(rng, item, depth + 1) for item in items]
        case inspect.DictType(key_type=key, value_type=value):
            many = 0 if depth > DEPTH_MAX else rng.choice((0, 1, 3))
            return {str(_made(rng, key, depth + 1)): _made(rng, value, depth + 1) for _ in range(many)}
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.EnumType(cls=cls):
            return rng.choice(list(cls)).value
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType():
            return rng.choice((0, 1, 1, 2, 7, 100, 2**31, 2**53, -1))
        case inspect.FloatType():
            return rng.choice((0.0, 0.5, 1.0, 30.0, 1e9, -1.0))
        case inspect.BytesType():
            return rng.randbytes(rng.choice((0, 1, 20)))
        case inspect.NoneType():
            return None
        case _:
            return rng.choice(_WORDS)


def _struct(rng: random.Random, kind: inspect.StructType, depth: int) -> Any:
    fields = {}
    for each in kind.fields:
        is_needed = each.required or kind.array_like
        if is_needed or rng.random() < (0.7 if depth < DEPTH_MAX else 0):
            fields[each.encode_name] = _made(rng, each.type, depth + 1)
    if kind.array_like:
        return [*([kind.tag] if kind.tag is not None else []), *fields.values()]
    return {**({kind.tag_field: kind.tag} if kind.tag_field is not None else {}), **fields}
