"""The request's shape: its fields, every bound, and that a refusal names the field, what came and what may."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.schemas.codec import canonical, decode_request, identity, same_request
from moorage.schemas.errors import CODES, Problem, Refused
from moorage.schemas.gpu import Distributed
from moorage.schemas.job import REPLICAS_MAX, Request, Run, kept_pattern
from moorage.schemas.names import is_job, is_tenant, is_worker, worker_slug
from moorage.schemas.staying import Ready
from tests.unit.schemas.impossible import IMPOSSIBLE, POSSIBLE

RUN: dict[str, Any] = {"driver": "noop"}


def decode(**fields: Any) -> Request:
    return decode_request(json.dumps({"run": RUN, **fields}).encode())


def refusal(body: bytes | dict[str, Any]) -> Problem:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(Refused) as caught:
        decode_request(payload)
    return caught.value.problem


# ---------------------------------------------------------------------------------------------------------- facts


def test_fact_01_an_empty_gpu_object() -> None:
    gpu = decode(gpu={}).gpu
    assert gpu is not None
    assert (gpu.count, gpu.effective_vendor, gpu.effective_sharing, gpu.effective_scheduling) == (
        1, "nvidia", "exclusive", "best-effort",
    )  # fmt: skip
    rest = {name: getattr(gpu, name) for name in gpu.__struct_fields__ if name != "count"}
    assert set(rest.values()) == {None, False}


def test_fact_02_no_gpu_object_is_no_gpu_request() -> None:
    assert decode().effective_gpu is None
    assert decode(gpu=None).effective_gpu is None
    assert decode(gpu={}).effective_gpu is not None
    assert decode() != decode(gpu={})


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu": {"cuont": 2}},
        {"gpu": {"distributed": {"port": 1}}},
        {"gpus": {}},
        {"run": {"driver": "noop", "comand": []}},
        {"resources": {"cpu": 1}},
        {"gpu": {"sharing": "mps", "share": {"percent": 5}}},
        {"resource_requirements": {"gpus": {}}},
        {"resource_requirements": {"gpu": {"counts": 1}}},
        {"run": {"driver": "noop", "env": {"A": {"secret": "x", "y": "z"}}}},
    ],
)
def test_fact_03_unknown_fields_are_rejected(fields: dict[str, Any]) -> None:
    problem = refusal({"run": RUN, **fields})
    assert problem.code == "invalid-argument"
    assert "unknown field" in problem.message
    assert problem.field.startswith("$")


@pytest.mark.parametrize("token", ["best-effort", "gang", "spread"])
def test_fact_04_scheduling_tokens_round_trip(token: str) -> None:
    request = decode(gpu={"scheduling": token})
    assert msgspec.to_builtins(request)["gpu"]["scheduling"] == token
    assert decode_request(canonical(request)) == request


@pytest.mark.parametrize("token", ["exclusive", "mps", "time-slice"])
def test_fact_04_sharing_tokens_round_trip(token: str) -> None:
    assert msgspec.to_builtins(decode(gpu={"sharing": token}))["gpu"]["sharing"] == token


@pytest.mark.parametrize(
    ("field", "token"),
    [("scheduling", token) for token in ("Gang", "GANG", "best_effort", "bestEffort", "", "pack", " gang")]
    + [("sharing", token) for token in ("MPS", "time_slice", "timeslice", "Exclusive", "", "none")],
)
def test_fact_04_other_tokens_are_rejected(field: str, token: str) -> None:
    problem = refusal({"run": RUN, "gpu": {field: token}})
    assert problem.code == "invalid-argument"
    assert problem.field == f"$.gpu.{field}"


def test_fact_05_distributed_defaults() -> None:
    gpu = decode(gpu={"distributed": {}}).gpu
    assert gpu is not None
    assert gpu.distributed is not None
    assert (gpu.distributed.backend, gpu.distributed.master_port) == ("nccl", 29500)


@pytest.mark.parametrize(
    "fields", [{"gpu": {"count": 0}}, {"resource_requirements": {"gpu": {"count": 0}}}, {"gpu": {"count": -1}}]
)
def test_fact_06_count_zero_is_an_invalid_argument(fields: dict[str, Any]) -> None:
    problem = refusal({"run": RUN, **fields})
    assert (problem.code, problem.fault) == ("invalid-argument", "caller")
    assert "count" in problem.field


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu": {}},
        {"gpu": {"model": "H100"}},
        {"resource_requirements": {"gpu": {}}},
        {"resource_requirements": {"gpu": {"count": None}}},
    ],
)
def test_fact_07_presence_without_a_count_is_one(fields: dict[str, Any]) -> None:
    gpu = decode(**fields).effective_gpu
    assert gpu is not None
    assert gpu.count == 1


def test_fact_07_openshells_shape_is_a_gpu_request() -> None:
    assert decode(resource_requirements={"gpu": {"count": 4}}).effective_gpu == decode(gpu={"count": 4}).effective_gpu
    assert decode(resource_requirements={}).effective_gpu is None
    assert refusal({"run": RUN, "gpu": {}, "resource_requirements": {"gpu": {}}}).code == "invalid-argument"


def test_fact_14_two_classes_of_refusal() -> None:
    """Shape is the caller's fault and an invalid argument; what this fleet or a limit refuses is something else."""
    assert CODES["invalid-argument"][0] == CODES["failed-precondition"][0] == "caller"
    assert CODES["no-match"][0] == CODES["queue-full"][0] == "fleet"
    for body in (b"{", b"[]", b'{"run":{}}', b'{"run":{"argv":["x"]},"priority":101}', b"\xc1", b"null", b"7"):
        assert refusal(body).code == "invalid-argument"


# ---------------------------------------------------------------------------------------------------- every bound


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"job": "a.b"}, "$.job", "[A-Za-z0-9_-]{1,64}"),
        ({"job": ""}, "$.job", "[A-Za-z0-9_-]{1,64}"),
        ({"job": "x" * 65}, "$.job", "[A-Za-z0-9_-]{1,64}"),
        ({"job": "a>b"}, "$.job", "[A-Za-z0-9_-]{1,64}"),
        ({"job": "a\n"}, "$.job", "[A-Za-z0-9_-]{1,64}"),
        ({"replicas": 0}, "$.replicas", "1..1000000"),
        ({"replicas": 1_000_001}, "$.replicas", "1..1000000"),
        ({"priority": -1}, "$.priority", "0..100"),
        ({"priority": 101}, "$.priority", "0..100"),
        ({"priority": 1.5}, "$.priority", "int"),
        ({"replicas": "2"}, "$.replicas", "int"),
        ({"replicas": True}, "$.replicas", "int"),
        ({"gpu": {"count": 65}}, "$.gpu.count", "1..64"),
        ({"gpu": {"count": "2"}}, "$.gpu.count", "int"),
        ({"gpu": {"min_compute_capability": "eight"}}, "$.gpu", "look like 8.0"),
        ({"gpu": {"min_compute_capability": 8.0}}, "$.gpu.min_compute_capability", "str"),
        ({"gpu": {"min_memory_mib": -1}}, "$.gpu.min_memory_mib", "0.."),
        ({"gpu": {"distributed": {"master_port": 0}}}, "$.gpu.distributed.master_port", "1..65535"),
        ({"gpu": {"distributed": {"master_port": 65536}}}, "$.gpu.distributed.master_port", "1..65535"),
        ({"gpu": {"sharing": "mps", "share": {"compute_percent": 0}}}, "$.gpu.share", "1..100"),
        ({"gpu": {"sharing": "mps", "share": {"memory_mib": -1}}}, "$.gpu.share", "0.."),
        ({"resources": {"cpu_milli": -1}}, "$.resources.cpu_milli", "0.."),
        ({"resources": {"memory_mib": 2**40}}, "$.resources.memory_mib", "0.."),
        ({"deadline_s": -1}, "$.deadline_s", "0.."),
        ({"start_within_s": 10**9}, "$.start_within_s", "0.."),
        ({"on_partition": "Kill"}, "$.on_partition", ""),
        ({"on_no_match": "no"}, "$.on_no_match", ""),
        ({"qos": "High"}, "$.qos", ""),
        ({"after": ["a.b"]}, "$.after", "[A-Za-z0-9_-]{1,64}"),
        ({"after": [{"job": "a", "when": "well"}]}, "$.after", ""),
        ({"after": [f"j{number}" for number in range(101)]}, "$.after", "at most 100 jobs"),
        ({"after": ["a", {"job": "a", "when": "any"}]}, "$.after", "each job once"),
    ],
)
def test_a_refusal_names_field_and_what_is_allowed(fields: dict[str, Any], field: str, says: str) -> None:
    problem = refusal({"run": RUN, **fields})
    assert problem.code == "invalid-argument"
    assert problem.field.startswith(field), problem
    assert says in problem.allowed, problem
    assert problem.next


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu": {"time_slice_index": 1}},
        {"gpu": {"sharing": "mps", "time_slice_index": 1}},
        {"gpu": {"sharing": "time-slice", "time_slice_index": 1, "count": 2}},
        {"gpu": {"sharing": "time-slice", "time_slice_index": 64}},
        {"gpu": {"share": {}}},
        {"gpu": {"sharing": "exclusive", "share": {"memory_mib": 5}}},
        {"gpu": {"model": []}},
        {"gpu": {"model": ["H100"] * 17}},
        {"gpu": {"model": " "}},
        {"gpu": {"model": "="}},
        {"gpu": {"model": "x" * 65}},
        {"gpu": {"model": ["ok", ""]}},
        {"requires": {"zone": []}},
        {"requires": {"a b": ["x"]}},
        {"labels": {"": "x"}},
        {"labels": {f"k{index}": "x" for index in range(65)}},
        {"retries": -1},
        {"retries_on_lost": 1001},
        {"run": None},
        {"run": {}},
        {"run": {"argv": []}},
        {"run": {"argv": ["a\0b"]}},
        {"run": {"argv": ["x"] * 1025}},
        {"run": {"driver": "noop", "env": {"1A": "x"}}},
        {"run": {"driver": "noop", "env": {"A=B": "x"}}},
        {"run": {"driver": "noop", "env": {"A": "x\0"}}},
        {"run": {"driver": "noop", "env": {"A": 5}}},
        {"run": {"driver": "noop", "timeout_s": -0.1}},
        {"run": {"driver": "noop", "grace_s": 10**9}},
        {"run": {"driver": "noop", "env": {f"A{index}": "x" for index in range(513)}}},
    ],
)
def test_what_no_fleet_could_satisfy_is_refused_at_the_edge(fields: dict[str, Any]) -> None:
    assert refusal({"run": RUN, **fields}).code == "invalid-argument"


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"9" * 5000])
def test_numbers_that_are_none(number: bytes) -> None:
    assert refusal(b'{"run":{"argv":["x"]},"deadline_s":' + number + b"}").code == "invalid-argument"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["deadline_s", "start_within_s"])
def test_nan_and_infinity_in_msgpack(number: float, field: str) -> None:
    assert refusal(msgspec.msgpack.encode({"run": RUN, field: number})).code == "invalid-argument"
    assert refusal(msgspec.msgpack.encode({"run": {**RUN, "timeout_s": number}})).code == "invalid-argument"


def test_too_large_and_too_deep_are_told_apart() -> None:
    assert refusal(b'{"run":{"argv":["x"]},"labels":{"a":"' + b"x" * 70_000 + b'"}}').code == "too-large"
    assert (
        refusal(b'{"run":{"argv":["x"]},"driver_config":{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}}").code
        == "too-large"
    )


# --------------------------------------------------------------------------------------------- the same, or another


def test_the_contracts_own_example() -> None:
    body = b"""{"job": "train-42", "replicas": 1, "priority": 50,
     "gpu": {"count": 2, "model": ["H100", "A100"], "min_memory_mib": 70000, "sharing": "exclusive",
             "scheduling": "best-effort"},
     "resources": {"cpu_milli": 4000, "memory_mib": 16384}, "requires": {"zone": ["a", "b"]},
     "run": {"driver": "process", "argv": ["python", "train.py"], "env": {"SEED": "7", "TOKEN": {"secret": "hf"}},
             "cwd": "/srv", "user": null, "timeout_s": 3600, "grace_s": 10, "checkpoint_signal": "SIGUSR1",
             "checkpoint_before_s": 60},
     "driver_config": {"docker": {"gpu_device_ids": ["nvidia.com/gpu=0"]}},
     "deadline_s": 7200, "start_within_s": 600, "retries": 2, "on_partition": "kill", "on_no_match": "wait",
     "labels": {}}"""
    request = decode_request(body)
    assert request.effective_gpu is not None
    assert (request.effective_gpu.models, request.effective_gpu.effective_vendor) == (("H100", "A100"), "")
    assert decode_request(canonical(request)) == request


def test_all_fields_of_the_source_are_taken() -> None:
    gpu = {
        "count": 1, "vendor": "nvidia", "mode": "native", "model": "A100", "scheduling": "gang", "sharing": "mps",
        "distributed": {"backend": "gloo", "master_port": 1}, "mps_pipe_dir": "/a", "mps_log_dir": "/b",
        "time_slicing_config_path": "/c",
    }  # fmt: skip
    assert msgspec.to_builtins(decode(gpu=gpu).gpu) == {key: value for key, value in gpu.items() if key != "count"}


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({"replicas": 1, "gpu": {"distributed": {}}}, True),
        ({"replicas": 3, "gpu": {"distributed": {}, "scheduling": "gang"}}, True),
        ({"replicas": 3, "gpu": {"distributed": {}}}, False),
        ({"replicas": 2, "gpu": {"distributed": {}, "scheduling": "spread"}}, False),
    ],
)
def test_several_replicas_that_are_no_gang_are_not_distributed(fields: dict[str, Any], is_right: bool) -> None:
    trouble = decode(**fields).trouble
    assert is_right if trouble is None else (trouble.field, is_right) == ("gpu.distributed", False)


@pytest.mark.parametrize(("last", "is_right"), [(9_998, True), (9_999, False)])
def test_kept_files_of_so_many_replicas_are_brought(last: int, is_right: bool) -> None:
    trouble = decode(run={"argv": ["true"], "files_of": [{"job": "a"}, {"job": "b", "replicas": f"0-{last}"}]}).trouble
    assert is_right if trouble is None else (trouble.field, trouble.found) == ("run.files_of", "10001 replicas")


def test_checkpoints_of_a_gang_are_by_steps_or_by_moments() -> None:
    run = {"argv": ["true"], "checkpoint": "ck"}
    for more in ({}, {"checkpoint_step": r"s(\d+)"}):
        assert decode(replicas=2, gpu={"scheduling": "gang"}, run=run | more).trouble is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"gpu": {}}, {"gpu": {"count": 1}}, True),
        ({"gpu": {}}, {}, False),
        ({"priority": 50}, {}, True),
        ({"labels": {"a": "1", "b": "2"}}, {"labels": {"b": "2", "a": "1"}}, True),
        ({"requires": {"z": ["a", "b"]}}, {"requires": {"z": ["b", "a"]}}, False),
        ({"deadline_s": 5}, {"deadline_s": 5.0}, True),
        ({"run": {**RUN, "grace_s": 10}}, {}, True),
        ({"run": {**RUN, "grace_s": 11}}, {}, False),
        ({"job": "a"}, {"job": "b"}, False),
        ({"events": "tenant"}, {}, True),
        ({"on_no_match": "reject"}, {}, True),
        ({"after": ["prep"]}, {"after": [{"job": "prep", "when": "succeeded"}]}, True),
        ({"after": ["prep"]}, {"after": [{"job": "prep", "when": "any"}]}, False),
    ],
)
def test_the_same_request(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    first, second = ({"run": RUN, **fields} for fields in (one, other))
    for encode_first in (json.dumps(first).encode(), msgspec.msgpack.encode(first)):
        assert same_request(encode_first, msgspec.msgpack.encode(second)) is same
        assert (identity(decode_request(encode_first)) == identity(decode(**other))) is same


def _defaults(kind: Any) -> list[tuple[str, object]]:
    """Return the fields of a struct that have a default to be written, with that default."""
    fields = msgspec.structs.fields(kind)
    return [(field.name, field.default) for field in fields if field.default not in (msgspec.NODEFAULT, None)]


@pytest.mark.parametrize(("name", "default"), _defaults(Run))
def test_a_default_of_run_that_is_written_is_the_same_request(name: str, default: object) -> None:
    run: dict[str, Any] = {"driver": "process", "argv": ["true"]}
    assert identity(decode(run={**run, name: default})) == identity(decode(run=run))


@pytest.mark.parametrize(("name", "default"), _defaults(Request))
def test_a_default_that_is_written_is_the_same_request(name: str, default: object) -> None:
    assert identity(decode(run=RUN, **{name: default})) == identity(decode(run=RUN))


@pytest.mark.parametrize(("name", "default"), _defaults(Distributed))
def test_a_default_of_a_gang_that_is_written_is_the_same_request(name: str, default: object) -> None:
    def gang(**fields: object) -> bytes:
        gpu = {"scheduling": "gang", "distributed": fields}
        return identity(decode(run=RUN, replicas=2, gpu=gpu))

    assert gang(**{name: default}) == gang()


@pytest.mark.parametrize(("name", "default"), _defaults(Ready))
def test_a_default_of_a_check_that_is_written_is_the_same_request(name: str, default: object) -> None:
    def kept(**fields: object) -> bytes:
        run = {"driver": "process", "argv": ["serve"], "ports": 1, "ready": {"tcp": "PORT", **fields}}
        return identity(decode(run=run))

    assert kept(**{name: default}) == kept()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "replicas": st.integers(1, REPLICAS_MAX),
            "priority": st.integers(0, 100),
            "labels": st.dictionaries(
                st.from_regex(r"[A-Za-z0-9_./-]{1,8}", fullmatch=True), st.text(max_size=5), max_size=4
            ),
            "requires": st.dictionaries(
                st.from_regex(r"[a-z]{1,4}", fullmatch=True),
                st.lists(st.text(max_size=3), min_size=1, max_size=3),
                max_size=2,
            ),
            "deadline_s": st.one_of(st.none(), st.floats(0, 10**6)),
            "gpu": st.one_of(
                st.none(),
                st.fixed_dictionaries(
                    {"count": st.integers(1, 64)}, optional={"model": st.sampled_from(["A", ["A", "=B"]])}
                ),
            ),
        },
    )
)
def test_the_canonical_form_is_one_whatever_the_encoding(fields: dict[str, Any]) -> None:
    body = {"run": RUN, **fields}
    backwards = dict(reversed(body.items()))
    forms = {
        canonical(decode_request(encode(form)))
        for encode in (msgspec.json.encode, msgspec.msgpack.encode)
        for form in (body, backwards)
    }
    assert len(forms) == 1
    assert decode_request(forms.pop()) == decode(**fields)


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a>", "*", "ä", "a\n", "x" * 65, "\0", "a/b"])
def test_names_that_would_be_another_subject(name: str) -> None:
    assert not is_job(name)
    assert not is_worker(name)
    assert not is_tenant(name)


def test_names() -> None:
    assert is_job("A-Z_09")
    assert is_worker("node-7_a")
    assert is_tenant("team-a")
    assert not is_tenant("Team")
    assert not is_tenant("t" * 33)


@given(st.text())
def test_any_host_name_gives_a_worker_id(host: str) -> None:
    assert is_worker(worker_slug(host))


@pytest.mark.parametrize(("fields", "field"), IMPOSSIBLE)
def test_what_no_worker_could_do_is_known_by_its_field_and_still_read(fields: dict[str, Any], field: str) -> None:
    trouble = decode_request(json.dumps(fields).encode()).trouble
    assert trouble is not None
    assert (trouble.field, bool(trouble.allowed)) == (field, True)
    assert trouble.message.startswith(field.rpartition(".")[2])


@pytest.mark.parametrize("fields", POSSIBLE)
def test_what_a_worker_may_be_able_to_do_is_no_trouble(fields: dict[str, Any]) -> None:
    assert decode_request(json.dumps(fields).encode()).trouble is None


@pytest.mark.parametrize("pattern", ["*a*a*a*a*ab", "***", "*a*/*a*/*a*/b", "**/*a*/**/*a*/b", "a/*b*c*"])
def test_a_keep_pattern_that_takes_long_to_match_is_refused(pattern: str) -> None:
    trouble = decode(run={**RUN, "keep": ["out/**", pattern]}).trouble
    assert trouble is not None
    assert (trouble.field, trouble.found) == ("run.keep[1]", pattern)
    assert "at most two stars" in trouble.message


@pytest.mark.parametrize("pattern", ["../*", "out/../../x", "!../x", "~/out/**", "~me/out"])
def test_a_keep_pattern_of_what_is_not_below_the_folder_is_refused(pattern: str) -> None:
    trouble = decode(run={**RUN, "keep": ["out/**", pattern]}).trouble
    assert trouble is not None
    assert (trouble.field, trouble.found) == ("run.keep[1]", pattern)


@pytest.mark.parametrize(
    ("written", "matched"),
    [
        ("out/**", "out/**"),
        ("./out/**", "/out/**"),
        ("!./model", "!/model"),
        ("out//model", "out/model"),
        ("a/./b/", "a/b/"),
        (".", "**"),
        ("./", "**"),
        ("a..b~", "a..b~"),
    ],
)
def test_a_keep_pattern_is_matched_without_what_says_nothing(written: str, matched: str) -> None:
    assert kept_pattern(written) == matched
    assert decode(run={**RUN, "keep": [written]}).trouble is None


def test_keep_patterns_as_people_write_them_are_taken() -> None:
    keep = ["out/**", "*.log", "**/out/**", "*/*/*/*/*.txt", "out/**/*model*.pt", "*a*/*b*", "!out/tmp/**"]
    assert decode(run={**RUN, "keep": keep}).trouble is None
