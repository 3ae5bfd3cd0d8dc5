"""Requests that were decoded once and told by their names: the same as decoding each."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from moorage.schemas.codec import decode_request, identity
from moorage.schemas.errors import Refused
from moorage.schemas.request_cache import BYTES_MAX, KNOWN_MAX, LONG_MAX, RequestCache

RUN: dict[str, Any] = {"driver": "noop"}


def same(requests: RequestCache, body: bytes) -> None:
    expected = decode_request(body)
    name, asked = requests.read(body)
    assert name == expected.job
    assert msgspec.structs.replace(asked.request, job=None) == msgspec.structs.replace(expected, job=None)
    assert asked.identity(name) == identity(expected)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_is_read_as_if_it_were_the_first(seed: int) -> None:
    chance, requests = random.Random(seed), RequestCache()
    for _ in range(400):
        name = chance.choice(("a", "b", "x" * 31, "x" * 32, "x" * 64, f"j{chance.randrange(9)}"))
        rest: dict[str, Any] = {"run": chance.choice((RUN, {"argv": ["a", 'say "job"']}, {"argv": ["\u00fc\\"]}))}
        if chance.random() < 0.5:
            rest["gpu"] = {"count": chance.randrange(1, 3), "model": chance.choice(("H100", "A100"))}
        if chance.random() < 0.3:
            rest["labels"] = {chance.choice(("job", "team")): "x"}
        whole = {"job": name, **rest} if chance.random() < 0.8 else {**rest, "job": name}
        if chance.random() < 0.1:
            del whole["job"]
        forms = [
            json.dumps(whole).encode(),
            json.dumps(whole, separators=(",", ":")).encode(),
            json.dumps(whole, indent=1).encode(),
            msgspec.msgpack.encode(whole),
        ]
        same(requests, chance.choice(forms))


@pytest.mark.parametrize(
    "rest",
    [b'"run":{"driver":"noop"},"job":"other"}', b'"run":{"driver":"noop"},"\\u006aob":"other"}'],
)
def test_a_second_name_behind_the_first_counts_as_ever(rest: bytes) -> None:
    requests = RequestCache()
    for name in (b"a", b"other", b"other", b"b", b"a"):
        body = b'{"job":"' + name + b'",' + rest
        assert requests.read(body)[0] == decode_request(body).job == "other"


def test_those_that_differ_in_their_names_are_decoded_once() -> None:
    requests = RequestCache()
    asked = [requests.read(b'{"job":"j%d","run":{"driver":"noop"}}' % number)[1] for number in range(5)]
    assert asked[0] is not asked[1]
    assert all(each is asked[1] for each in asked[2:])


@pytest.mark.parametrize("name", ["", "a b", "a.b", "x" * 65, "\u00fc"])
def test_a_name_is_checked_though_the_rest_is_known(name: str) -> None:
    requests = RequestCache()
    for number in range(3):
        requests.read(b'{"job":"j%d","run":{"driver":"noop"}}' % number)
    body = json.dumps({"job": name, "run": RUN}, separators=(",", ":"), ensure_ascii=False).encode()
    with pytest.raises(Refused) as refused:
        requests.read(body)
    with pytest.raises(Refused) as expected:
        decode_request(body)
    assert refused.value.problem == expected.value.problem


def test_what_is_refused_is_refused_each_time() -> None:
    requests = RequestCache()
    for number in range(4):
        with pytest.raises(Refused):
            requests.read(b'{"job":"j%d","run":{"driver":"noop"},"priority":101}' % number)


def test_what_is_remembered_is_bounded() -> None:
    requests = RequestCache()
    for number in range(3 * KNOWN_MAX):
        same(requests, json.dumps({"job": "a", "run": RUN, "priority": 7, "labels": {"n": str(number)}}).encode())
    assert len(requests._known) <= KNOWN_MAX
    before = len(requests._known)
    for _ in range(3):
        same(requests, json.dumps({"job": "a", "run": RUN, "labels": {"n": "x" * BYTES_MAX}}).encode())
    assert len(requests._known) == before


def test_the_last_long_ones_are_decoded_once_and_each_keeps_its_name() -> None:
    requests, env = RequestCache(), "x" * BYTES_MAX
    bodies = [b'{"job":"j%d","run":{"driver":"noop","env":{"A":"%b"}}}' % (at, env.encode()) for at in range(3)]
    asked = [requests.read(body) for body in bodies]
    assert [name for name, _ in asked] == ["j0", "j1", "j2"]
    for body, (name, first) in zip(bodies, asked, strict=True):
        assert requests.read(bytes(bytearray(body))) == (name, first)
    for at in range(LONG_MAX):
        requests.read(b'{"job":"k%d","run":{"driver":"noop","env":{"A":"%b"}}}' % (at, env.encode()))
    assert requests.read(bodies[0])[1] is not asked[0][1], "only the last few are held"
