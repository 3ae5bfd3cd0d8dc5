"""What is refused is told so that it can be mended: which field, what was found, what is allowed, what to do next."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from moorage.schemas.codec import Decoder, decode_request, is_json
from moorage.schemas.errors import Problem, Refused
from moorage.schemas.frames import Join, Load, Renew
from moorage.schemas.job import Request
from moorage.schemas.operate import act_of


def refused(**fields: Any) -> Problem:
    with pytest.raises(Refused) as error:
        decode_request(json.dumps({"run": {"argv": ["a"]}, **fields}).encode())
    return error.value.problem


@pytest.mark.parametrize(
    ("fields", "field", "found", "allowed"),
    [
        ({"gpu": {"sharing": "MPS"}}, "$.gpu.sharing", "'MPS'", "exclusive, mps, time-slice"),
        ({"gpu": {"scheduling": ""}}, "$.gpu.scheduling", "''", "best-effort, gang, spread"),
        ({"on_partition": "die"}, "$.on_partition", "'die'", "keep, kill"),
        ({"gpu": {"share": {"memory_mib": -1}}}, "$.gpu.share.memory_mib", "-1", "0..16777216"),
        ({"gpu": {"model": [""]}}, "$.gpu.model", "''", "patterns of 1..64 characters"),
        ({"retries_on_lost": 2000}, "$.retries_on_lost", "2000", "0..1000"),
        ({"labels": {"a b": ""}}, "$.labels", "'a b'", "keys of 1..63 letters, digits and _./-"),
        ({"requires": {"Zone/x": []}}, "$.requires.Zone/x", "0", "1..64 values"),
        ({"run": {"argv": []}}, "$.run.argv", "none", "a command for the driver process"),
        ({"run": {"argv": ["a\0"]}}, "$.run.argv", "a NUL", "text without NUL"),
    ],
)
def test_field_found_and_allowed(fields: dict[str, Any], field: str, found: str, allowed: str) -> None:
    told = refused(**fields)
    assert (told.field, told.found) == (field, found)
    assert sorted(told.allowed.split(", ")) == sorted(allowed.split(", "))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"run": {"argv": ["a"], "env": {"A": "1", "WORLD": 4, "B": "2", "C": 5}}}, "$.run.env.WORLD"),
        ({"labels": {"team": "x", "shard": 4}}, "$.labels.shard"),
        ({"requires": {"disk": ["ssd"], "zone": "a"}}, "$.requires.zone"),
        ({"requires": {"disk": ["ssd"], "zone": [1]}}, "$.requires.zone[0]"),
        ({"labels": {f"k{at}": "x" if at != 37 else 0 for at in range(60)}}, "$.labels.k37"),
    ],
)
@pytest.mark.parametrize("encode", [lambda body: json.dumps(body).encode(), msgspec.msgpack.encode])
def test_the_key_of_an_object_whose_value_is_wrong_is_named(
    fields: dict[str, Any], field: str, encode: Callable[[Any], bytes]
) -> None:
    with pytest.raises(Refused) as error:
        decode_request(encode({"run": {"argv": ["a"]}, **fields}))
    told = error.value.problem
    assert told.field == field
    assert told.message.startswith(field.split(".")[-1].removesuffix("[0]") + ": Expected")


def test_the_value_of_a_variable_is_never_quoted() -> None:
    told = refused(run={"argv": ["a"], "env": {"TOKEN": "hf_abc\0"}})
    assert told.field == "$.run.env.TOKEN"
    assert "hf_abc" not in msgspec.json.encode(told).decode()


@pytest.mark.parametrize(
    ("fields", "near"),
    [
        ({"resources": {"cpu": 1}}, ""),  # the gpu of a request is no field of its resources
        ({"resources": {"memory": 1}}, "memory_mib"),
        ({"run": {"argv": ["a"], "env": {"A": {"sekret": "b"}}}}, "secret"),
        ({"prioritie": 7}, "priority"),
        ({"env": {"A": "b"}}, "run.env"),  # a field of `run`
        ({"command": ["true"]}, "run.argv"),
        ({"time_limit": "1h"}, "run.timeout_s"),
        ({"name": "train"}, "job"),
    ],
)
def test_the_nearest_field_is_one_of_that_object(fields: dict[str, Any], near: str) -> None:
    said = refused(**fields).next
    assert said == (f"the nearest field is {near}" if near else "moorage schema request has every field")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Request, "moorage schema request has every field"),
        (Load, "moorage schema load has every field"),
        (dict[str, Any], ""),
        (Join | Renew, ""),
    ],
)
def test_the_next_step_is_the_schema_of_what_was_to_be_read(kind: Any, said: str) -> None:
    with pytest.raises(Refused) as error:
        Decoder(kind)(b"[]")
    assert error.value.problem.next == said


def test_of_a_duration_it_is_told_how_it_is_said() -> None:
    assert refused(deadline_s="1h").next == "say it in seconds, as a number: 3600 is an hour"
    assert refused(run={"argv": ["a"], "grace_s": "10"}).next == refused(deadline_s="1h").next
    assert refused(deadline_s=-1).next.startswith("give 0..")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gpu": "2xH100"}, 'write it as {"count": 2, "model": "H100"}'),
        ({"gpu": 1}, 'write it as {"count": 2, "model": "H100"}'),
        ({"run": {"argv": "echo hello"}}, 'write it as ["sh", "-c", "echo hello"]'),
        ({"run": {"argv": ["a"], "env": ["SEED=7"]}}, 'write it as {"SEED": "7"}'),
        ({"after": "train-42"}, 'write it as ["train-42"]'),
    ],
)
def test_a_field_of_another_type_is_told_as_it_is_written(fields: dict[str, Any], says: str) -> None:
    assert refused(**fields).next == says


LONG = 70_000 * "x"


def test_a_word_and_a_value_may_be_as_long_as_the_request() -> None:
    run = {"argv": ["a", 30_000 * "x"], "env": {"V": 33_000 * "y"}}
    assert decode_request(json.dumps({"run": run}).encode()).workload.env == run["env"]


@pytest.mark.parametrize(
    ("fields", "way_on"),
    [
        ({"run": {"argv": ["sh", "-c", LONG]}}, "put long words and values into a file among the job's files (--with)"),
        ({"run": {"argv": ["a"] * 2_001}}, "put the words into a file among the job's files (--with)"),
        ({"run": {"argv": ["a"], "env": {"V": LONG}}}, "put long words and values into a file among the job's files"),
        ({"run": {"argv": ["a"], "env": {"A B": "1"}}}, "name it as MY_VARIABLE; a function of a shell"),
        ({"job": "a,b"}, "name it with 1..64 letters, digits, - and _, as train-42"),
        ({"after": ["a,b"]}, "name each job by its id in full"),
        ({"priority": 200}, "give 0..100"),
        ({"indices": "9-0"}, "give ranges that go up"),
        ({"indices": "0-3", "replicas": 2}, "leave it out"),
        ({"labels": {"a b": "c"}}, "let it have keys of 1..63 letters"),
        ({"gpu": {"count": 0}}, "give 1..64"),
    ],
)
def test_a_bound_says_the_way_on_and_not_the_schema(fields: dict[str, Any], way_on: str) -> None:
    told = refused(**{"run": {"argv": ["a"]}, **fields})
    assert told.next.startswith(way_on)
    assert LONG not in msgspec.json.encode(told).decode()


def test_of_an_operator_s_act_the_choices_are_told_too() -> None:
    with pytest.raises(Refused) as error:
        act_of("hold", {"tenant": "vision", "jobb": "a"})
    assert error.value.problem.next == "the nearest field is job"


@pytest.mark.parametrize("payload", [b"null", b"true", b"7", b"-1", b"\xef\xbb\xbf{}", b"NaN", b"hello", b"\xff"])
def test_what_is_neither_is_answered_as_json(payload: bytes) -> None:
    assert is_json(payload)
    with pytest.raises(Refused):
        decode_request(payload)


@pytest.mark.parametrize(
    "what", [{}, {"a": 1}, [], [1] * 16, {str(n): n for n in range(20)}, {str(n): 0 for n in range(70_000)}]
)
def test_every_map_and_array_of_msgpack_is_told_from_json(what: object) -> None:
    assert not is_json(msgspec.msgpack.encode(what))
    assert is_json(msgspec.json.encode(what))
