"""Requests from their parts, and the parts themselves: durations, job ids, GPUs."""

from __future__ import annotations

import functools
import os
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.client import AsyncClient, Gpu, GpuSpec, Rejected, Request, Secret, job_ids, request_builder
from moorage.client.durations import seconds
from moorage.client.job_ids import fresh_job_id
from moorage.client.request_builder import RequestBuilder, build_request
from moorage.schemas.codec import encode
from moorage.schemas.gpu import parse_token
from moorage.schemas.job import After
from moorage.schemas.names import JOB_ID_DIGITS, is_job
from tests.unit.schemas.impossible import IMPOSSIBLE


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("90", 90),
        ("90s", 90),
        ("10m", 600),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("500ms", 0.5),
        ("2d", 172800),
        ("1.5h", 5400),
        (3, 3),
    ],
)
def test_durations(text: float | str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "soon", "-1", "10x", "1h 30m x", "1h  30m", "1 h", "1h 30", "nan", "400d", "1m1"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(Rejected) as refused:
        seconds(text)
    assert refused.value.code == "invalid-argument"
    assert refused.value.fixes


def test_job_ids_sort_by_time_and_are_names() -> None:
    ids = [fresh_job_id() for _ in range(1000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert all(is_job(each) and len(each) == 15 for each in ids)


def test_ids_of_one_millisecond_count_up_over_every_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.client.job_ids.time.time", lambda: 1_800_000_000.0)
    monkeypatch.setattr(job_ids, "_last", (1_800_000_000_000 << 25) + 2**20 - 1500)
    ids = [fresh_job_id() for _ in range(4000)]
    digits = {digit: value for value, digit in enumerate(JOB_ID_DIGITS)}
    numbers = [functools.reduce(lambda number, digit: 32 * number + digits[digit], each[1:], 0) for each in ids]
    assert numbers == [job_ids._last - 3999 + at for at in range(4000)]
    assert numbers[0] >> 25 == 1_800_000_000_000


@pytest.mark.parametrize(("limit", "timeout_s"), [("1m30s", 90), (90, 90), (None, None)])
def test_a_limit_bounds_an_attempt(limit: str | float | None, timeout_s: float | None) -> None:
    fields = {"limit": limit}
    assert build_request(["x"], fields=fields).workload.timeout_s == timeout_s
    assert RequestBuilder().build(["x"], fields=fields).workload.timeout_s == timeout_s
    with pytest.raises(TypeError, match="how long the job may run is limit"):
        build_request(["x"], fields={"timeout_s": 90})


def test_a_request_from_its_parts() -> None:
    request = build_request(["a", "b"], "3x2xA100", "k", {"env": {"T": Secret("hf")}, "limit": 5.0, "retries": 1})
    assert (request.job, request.replicas, request.retries) == ("k", 3, 1)
    assert request.gpu == GpuSpec(count=2, model="A100")
    assert (request.workload.argv, request.workload.timeout_s) == (["a", "b"], 5.0)
    assert request.workload.env == {"T": Secret("hf")}
    again = build_request(request, 1)
    assert (again.job, again.gpu) == ("k", GpuSpec())


@pytest.mark.parametrize(
    ("what", "gpu", "fields", "field"),
    [
        (["x"], "80G", {}, "$.gpu"),
        (["x"], "H100|lots", {}, "$.gpu"),
        (["x"], True, {}, "$.gpu"),
        (["x"], 2.5, {}, "$.gpu"),
        (["x"], 0, {}, "$.gpu"),
        (["x"], ["1xH100"], {}, "$.gpu"),
        (["x"], "1xH100", {"replicas": 0}, "$.replicas"),
        (["x"], "2x1xH100", {"replicas": 3}, "$.gpu"),
        (["x"], None, {"limit": -1.0}, "$.run.timeout_s"),
        ({"run": {"argv": ["x"]}, "nonsense": 1}, None, {}, "$.nonsense"),
        ([], None, {}, "$.run.argv"),
        ({}, None, {}, "$"),
    ],
)
def test_a_bad_request_names_its_field(what: object, gpu: object, fields: dict[str, object], field: str) -> None:
    with pytest.raises(Rejected) as refused:
        build_request(what, gpu, None, fields)  # type: ignore[arg-type]
    assert refused.value.code == "invalid-argument"
    assert refused.value.problem.field == field


@pytest.mark.parametrize(
    ("parts", "token"),
    [
        ({}, "1xany"),
        ({"count": 4}, "4xany"),
        ({"model": "H100 | A100", "count": 2, "memory": "80G"}, "2xH100|A100:80G"),
        ({"model": "L40S", "share": "mps=50%,4G"}, "1xL40S@mps=50%,4G"),
        ({"memory": 70_000, "share": "time-slice"}, "1xany:70000M@time-slice"),
        ({"model": "=A10"}, "1x=A10"),
    ],
)
def test_gpus_in_parts_are_the_token(parts: dict[str, Any], token: str) -> None:
    assert (1, Gpu(**parts)) == parse_token(token)


def test_gpus_in_parts_take_what_no_token_says() -> None:
    spec = Gpu("MI300X", scheduling="gang", vendor="amd")
    assert (spec.model, spec.scheduling, spec.vendor) == ("MI300X", "gang", "amd")
    spec = Gpu(share="mps=25%", compute_capability="8.6", prefer="spread")
    assert (spec.min_compute_capability, spec.prefer, spec.sharing) == ("8.6", "spread", "mps")
    with pytest.raises(Rejected, match=r"min_compute_capability must look like 8\.0"):
        Gpu(compute_capability="sm_80")


@pytest.mark.parametrize(
    "parts",
    [
        {"count": 0},
        {"model": "2xH100"},
        {"model": "H100:80G"},
        {"model": "H100@mps"},
        {"memory": "80Q"},
        {"share": "?"},
    ],
)
def test_parts_that_are_none_are_told(parts: dict[str, Any]) -> None:
    with pytest.raises(Rejected) as refused:
        Gpu(**parts)
    assert refused.value.fixes


def test_requests_by_template_are_those_that_are_built_one_by_one() -> None:
    """Whatever was asked for before: other fields, the same ones changed in place, ids, and what is refused."""
    chance, requests = random.Random(7), RequestBuilder()
    env: dict[str, Any] = {"SEED": "1"}
    choices: dict[str, list[Any]] = {
        "what": [["x"], ("y", 1), ("y", 1.0), ["y", b"b"], [], {"run": {"argv": ["z"]}}, "text", ["nul\0"]],
        "gpu": [None, 1, 2, "2xH100:80G", "3x2xA100", GpuSpec(count=4), "?", 0],
        "job": [None, None, "k", "no.id", 7],
        "fields": [{}, {"env": env}, {"retries": 2}, {"retries": 2.5}, {"priority": 101}, {"driver": "noop"}],
    }
    built = 0
    for _ in range(4000):
        env["SEED"] = chance.choice(["1", "2"])
        what, gpu, job, fields = (chance.choice(values) for values in choices.values())
        try:
            expected: Any = build_request(what, gpu, job, fields)
        except Rejected as refused:
            expected = refused.code
        try:
            found: Any
            found, body = requests.encoded(what, gpu, job, fields)
            assert body == encode(found)
            built += 1
        except Rejected as refused:
            found = refused.code  # of two faults either may be told first
        if job is None and isinstance(expected, Request):
            expected = msgspec.structs.replace(expected, job=found.job)
            assert is_job(str(found.job))
        assert found == expected
    assert built > 500


@pytest.mark.parametrize("what", [["true"], ()])
def test_what_is_said_again_is_checked_once(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no command, as a driver may need none."""
    encoded: list[object] = []

    def note(frame: object) -> bytes:
        encoded.append(frame)
        return encode(frame)

    monkeypatch.setattr(request_builder, "encode", note)
    requests = RequestBuilder()
    bodies = [requests.encoded(what, "1xH100", f"j{number}", {"driver": "noop"})[1] for number in range(5)]
    assert len(encoded) == 1
    assert [msgspec.json.decode(body)["job"] for body in bodies] == [f"j{number}" for number in range(5)]


def test_words_are_what_they_look_like() -> None:
    """1, 1.0 and True are equal, and three words."""
    requests = RequestBuilder()
    said: list[Any] = [1, 1.0, True, 1, Path("/a"), "/a"]
    words = [requests.build(["x", word]).workload.argv[1] for word in said]
    assert words == ["1", "1.0", "True", "1", "/a", "/a"]


@pytest.mark.parametrize("what", [b"text", ["x", b"y"], ["x", None], ["x", ["y", "z"]], ["x", "\udcff"]])
def test_what_is_no_word_is_refused_and_not_spelled_out(what: Any) -> None:
    for requests in (RequestBuilder(), RequestBuilder()):
        with pytest.raises(Rejected) as refused:
            requests.encoded(what)
        assert refused.value.code == "invalid-argument"
        requests.encoded(["x"])
        with pytest.raises(Rejected):  # beside a template, too
            requests.encoded(what)


def test_what_stands_for_text_and_tables_is_taken_as_such() -> None:
    request = build_request(["x"], fields={"env": os.environ | {"A": "1"}, "cwd": Path("/srv")})
    assert (request.workload.env["A"], request.workload.cwd) == ("1", "/srv")
    assert build_request(["x"], fields={"env": os.environ}).workload.env == dict(os.environ)
    with pytest.raises(TypeError, match="a value of type Fraction"):
        build_request(["x"], fields={"retries": Fraction(1)})


def test_an_error_has_what_its_message_leaves_out_as_notes() -> None:
    """So that a traceback names the field."""
    with pytest.raises(Rejected) as refused:
        build_request(["x"], fields={"grace_s": "10m"})
    assert "at $.run.grace_s" in refused.value.__notes__


def test_a_variable_that_is_no_text_is_named_and_its_value_is_not_told() -> None:
    for what, fields in (
        (["x"], {"env": {"A": "1", "SEED": 4711}}),
        ({"run": {"argv": ["x"], "env": {"SEED": 4711}}}, {}),
    ):
        with pytest.raises(Rejected, match="the variable SEED must be text, found int") as refused:
            build_request(what, fields=fields)
        assert refused.value.problem.field == "$.run.env.SEED"
        assert "4711" not in msgspec.json.encode(refused.value.problem).decode()


@pytest.mark.parametrize(("fields", "field"), IMPOSSIBLE)
def test_what_no_worker_could_do_is_refused_before_it_is_sent(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Rejected) as refused:
        build_request(fields)
    assert (refused.value.code, refused.value.problem.field) == ("invalid-argument", f"$.{field}")


def test_a_builder_refuses_a_command_without_a_program_behind_one_with_it() -> None:
    builder = RequestBuilder()
    builder.encoded(["true"])
    with pytest.raises(Rejected) as refused:
        builder.encoded([""])
    assert refused.value.problem.field == "$.run.argv"


def test_jobs_that_go_first_are_ids_or_say_which_end_counts() -> None:
    said = ["prep", {"job": "tidy", "when": "any"}, After("old", "failed")]
    request = build_request(["eval"], fields={"after": said})
    assert request.after == [After("prep"), After("tidy", "any"), After("old", "failed")]
    assert build_request(request, job="b").after == request.after
    assert build_request(["eval"], fields={"after": After("tidy", "any")}).after == [After("tidy", "any")]
    for alone in ("prep", AsyncClient().job("prep")):
        assert build_request(["eval"], fields={"after": alone}).after == [After("prep")]
        prepared = RequestBuilder().build(["eval"], fields={"after": [alone, "tidy"]})
        assert prepared.after == [After("prep"), After("tidy")]
    with pytest.raises(Rejected, match="each job once"):
        build_request(["eval"], fields={"after": ["prep", "prep"]})
