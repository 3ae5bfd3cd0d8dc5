"""Bytes that are nearly right: mutations of the bytes, and of what they say, in either encoding. Chance from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec

#: what a field may suddenly be
EDGES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e308, "", "a", "a.b", "*", ">",
    " ", "\x00", "\ud7ff", "é" * 40, "x" * 70_000, b"", b"\xff" * 40, [], {}, [[]], {"a": []}, [None] * 50, "1h", "-1s",
    "2xH100:80G", "../..", "GPU-0",
)  # fmt: skip
NESTED: Final = 3_000
_TREE_STEPS_MAX: Final = 3
_BYTES_STEPS_MAX: Final = 4


def mutated(rng: random.Random, payload: bytes, others: Sequence[bytes]) -> bytes:
    """Another payload like this one. `others` lend pieces of themselves."""
    if rng.random() < 0.6 and (tree := _tree(payload)) is not None:
        for _ in range(rng.randint(1, _TREE_STEPS_MAX)):
            tree = _changed(rng, tree)
        try:
            encode = msgspec.json.encode if rng.random() < 0.5 else msgspec.msgpack.encode
            payload = encode(tree)
        except (OverflowError, UnicodeEncodeError, TypeError, ValueError):
            pass  # what no encoder writes; its bytes are changed in place of it
        if rng.random() < 0.7:
            return payload
    for _ in range(rng.randint(1, _BYTES_STEPS_MAX)):
        payload = _bytes_changed(rng, payload, others)
    return payload


def _tree(payload: bytes) -> Any:
    for decode in (msgspec.msgpack.decode, msgspec.json.decode):
        try:
            found = decode(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
        if isinstance(found, dict | list):
            return found
    return None


def _changed(rng: random.Random, tree: Any) -> Any:
    """A tree with one place changed, found by going down at random."""
    if isinstance(tree, dict) and tree and rng.random() < 0.8:
        key = rng.choice(list(tree))
        change = rng.random()
        if change < 0.1:
            return {other: value for other, value in tree.items() if other != key}
        if change < 0.2:
            return {**tree, rng.choice(("", "kind", "v", str(key) + "x", "a" * 300)): rng.choice(EDGES)}
        if change < 0.3 and isinstance(key, str):
            return {rng.choice((key.upper(), key[:-1], "v")) if each == key else each: tree[each] for each in tree}
        return {**tree, key: _changed(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        at, change = rng.randrange(len(tree)), rng.random()
        if change < 0.1:
            return tree[:at] + tree[at + 1 :]
        if change < 0.2:
            return tree[:at] + [tree[at]] * rng.choice((2, 2, 300)) + tree[at + 1 :]
        if change < 0.3:
            return tree[:at]
        return [*tree[:at], _changed(rng, tree[at]), *tree[at + 1 :]]
    if isinstance(tree, bytes) and tree and rng.random() < 0.5:
        return _bytes_changed(rng, tree, ())
    if isinstance(tree, int) and rng.random() < 0.5:
        return tree + rng.choice((-1, 1, 7, 1 << 20))
    if isinstance(tree, str) and tree and rng.random() < 0.3:
        at = rng.randrange(len(tree))
        return tree[:at] + rng.choice((".", " ", "\n", "\x00", "é", "")) + tree[at + 1 :]
    return rng.choice(EDGES)


def _bytes_changed(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.choice((1, 1, 2, 4, 9))) + data[at:]
        case 2:
            return data[:at] + data[at + rng.choice((1, 1, 2, 8)) :]
        case 3 if data:
            at %= len(data)
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 4 if others:
            other = rng.choice(others)
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        case 5:
            return data + data[:at]
        case 6 if rng.random() < 0.05:
            return rng.choice((b"[" * NESTED, b"\x91" * NESTED, b'{"a":' * NESTED, b"\x81\xa1a" * NESTED)) + data
        case _:
            return data[:at] + rng.choice((b"\xff", b"\x00", b"\xc1", b"\xdd\xff\xff\xff\xff", b'"', b"}", b"NaN"))
