"""Each field of a request, with each kind of its values, through each door: one request, or one refusal by name."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec
import pytest
import yaml

from moorage.cli import main
from moorage.cli.framework import arguments
from moorage.client import AsyncClient, Rejected
from moorage.client.request_builder import build_request
from moorage.schemas.codec import decode_request, encode, identity, named_twice
from moorage.schemas.errors import MoorageError, refuse
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.handler import not_finite
from moorage.schemas.job import Request
from moorage.testing import SimFleet, SimulatedClock
from moorage.testing.requests import (
    BESIDE,
    FIELDS,
    TEXT_ALONE,
    Drawn,
    Field,
    Value,
    alone,
    beside,
    drawn,
    paths_of_requests,
    values_of,
)

#: requests that are drawn; in the system layer more
FEW: Final = 16
MANY: Final = 200

Door = Callable[[Drawn, Any], Request]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arguments, "get_type_hints", functools.cache(get_type_hints))  # else a second of each run


class Refusal(Exception):
    """What a door says of a request that it does not take."""


# ---------------------------------------------------------------------------------------------------------- doors


def _dry(capsys: pytest.CaptureFixture[str], *words: str) -> Request:
    code = main.run(["submit", "--dry-run", *words])
    out, err = capsys.readouterr()
    if code:
        raise Refusal(err)
    return msgspec.json.decode(out, type=Request)


def _argv(asked: Drawn) -> list[str]:
    argv: list[str] = asked.body["run"]["argv"]
    return argv


def by_command(asked: Drawn, capsys: Any) -> Request:
    words = [f"--{name}" if text is None else f"--{name}={text}" for name, text in asked.options or ()]
    return _dry(capsys, *words, "--", *_argv(asked))


def _by_name(asked: Drawn) -> dict[str, Any]:
    """The options as a file has them, each once."""
    found: dict[str, Any] = {}
    for name, text in asked.options or ():
        held = found.get(name)
        value: Any = True if text is None else text
        found[name] = value if held is None else [*(held if isinstance(held, list) else [held]), value]
    if "driver-config" in found:
        with contextlib.suppress(ValueError):
            found["driver-config"] = json.loads(found["driver-config"])
    return found


def by_yaml(asked: Drawn, capsys: Any) -> Request:
    Path("job.yaml").write_text(yaml.safe_dump({"command": _argv(asked), **_by_name(asked)}, allow_unicode=True))
    return _dry(capsys, "-f", "job.yaml")


def by_toml(asked: Drawn, capsys: Any) -> Request:
    content = {"command": _argv(asked), **_by_name(asked)}
    Path("job.toml").write_text("".join(f"{name} = {_toml(value)}\n" for name, value in content.items()))
    return _dry(capsys, "-f", "job.toml")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def by_json(asked: Drawn, capsys: Any) -> Request:
    Path("job.json").write_bytes(msgspec.json.format(encode(asked.body)))
    return _dry(capsys, "-f", "job.json")


def by_python(asked: Drawn, _: Any) -> Request:
    body = asked.body
    fields = {name: value for name, value in body.items() if name not in ("run", "gpu", "job")}
    run = {("limit" if name == "timeout_s" else name): value for name, value in body["run"].items()}
    try:
        gpu = msgspec.convert(body.get("gpu"), GpuSpec | None)
    except msgspec.ValidationError as error:  # as it is raised where `GpuSpec` is made
        raise Refusal(f"gpu: {error}") from None
    return build_request(run.pop("argv"), gpu, body.get("job"), fields | run)


def by_mapping(asked: Drawn, _: Any) -> Request:
    return build_request(asked.body)


def by_wire(asked: Drawn, _: Any) -> Request:
    request = decode_request(encode(asked.body))
    if (trouble := request.trouble) is not None:
        raise refuse("invalid-argument", trouble.message, field=f"$.{trouble.field}")
    return request


OF_PEOPLE: Final[Mapping[str, Door]] = {"command": by_command, "yaml": by_yaml, "toml": by_toml}
OF_PROGRAMS: Final[Mapping[str, Door]] = {
    "json": by_json,
    "python": by_python,
    "mapping": by_mapping,
    "wire": by_wire,
}
#: fields that the keywords of `submit` do not have
NO_KEYWORD: Final = ("again_of", "person", "resource_requirements", "template", "run.stdin", "gpu.")


def doors_of(asked: Drawn) -> dict[str, Door]:
    """Return the doors through which this request can be said."""
    found = dict(OF_PEOPLE) if asked.options is not None else {}
    if not any(value.wire is TEXT_ALONE for _, value in asked.said):
        found |= OF_PROGRAMS
    if any(field.path.startswith(NO_KEYWORD) for field, _ in asked.said):
        found.pop("python", None)
    return found


def asked_for(asked: Drawn, request: Request) -> dict[str, Any]:
    """What a door's request asks for; its id is left out where the door has made it."""
    named = request if "job" in asked.body else msgspec.structs.replace(request, job=None)
    plain: dict[str, Any] = msgspec.msgpack.decode(identity(named))
    return plain


# ---------------------------------------------------------------------------------------------------------- tests


def test_the_table_has_every_field_of_a_request_and_every_option() -> None:
    from dataclasses import fields

    from moorage.cli.jobs.job_flags import JobFlags

    parts = [field.path.split(".") for field in FIELDS]
    assert {".".join(path[: 2 if path[0] == "run" else 1]) for path in parts} == paths_of_requests()
    options = {field.name.strip("_").replace("_", "-") for field in fields(JobFlags)}
    #: what these say is in other options' fields
    apart = {"or-gpu", "gpu-device", "each-line", "each", "gang", "hosts", "spread", "env-file", "with", "on", "not-on"}
    apart |= {"no-retry-on", "same", "nvlink", "once"}
    assert {field.option for field in FIELDS} - {""} == options - apart


#: a part of the values, and all of them
PARTS: Final = [pytest.param(16, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


def asked_of(step: int, *, good: bool) -> Iterator[tuple[Field, Value, Drawn, dict[str, Door]]]:
    """Yield each value that is accepted, or is refused, and its doors: those of people for one in `step`."""
    cases = [(field, value) for field, value, is_good in values_of() if is_good == good]
    for at, (field, value) in enumerate(cases):
        asked = alone(field, value)
        yield (
            field,
            value,
            asked,
            {name: door for name, door in doors_of(asked).items() if at % step == 0 or name not in OF_PEOPLE},
        )


@pytest.mark.parametrize("step", PARTS)
def test_each_value_is_one_request_through_each_door(step: int, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for field, value, asked, doors in asked_of(step, good=True):
        told, refused = {}, {}
        for name, door in doors.items():
            try:
                told[name] = asked_for(asked, door(asked, capsys))
            except (Refusal, MoorageError) as error:
                refused[name] = str(error)
        if refused or any(each != told["wire"] for each in told.values()):
            wrong.append(f"{field.path} {value.wire!r} {value.texts}: {refused or told}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("step", PARTS)
def test_what_is_refused_is_refused_by_its_name_at_each_door(step: int, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for field, value, asked, doors in asked_of(step, good=False):
        for name, door in doors.items():
            if name in ("json", "wire") and not_finite("", asked.body):
                continue  # JSON has no such number: an encoder writes null
            told = f"{field.path} {value.wire!r} {value.texts} {name}"
            try:
                taken = door(asked, capsys)
            except (MoorageError, Refusal) as refused:
                if why := unnamed(field, name, refused):
                    wrong.append(f"{told}: {why}: {refused}")
            else:
                if name != "wire" or not value.taken_on_the_wire:
                    wrong.append(f"{told}: taken as {taken}")
    assert not wrong, "\n".join(wrong)


def unnamed(field: Field, door: str, refused: Exception) -> str:
    """Return what a refusal does not name; "" if it names what it is about."""
    said = str(refused) + (f" {refused.problem.field}" if isinstance(refused, MoorageError) else "")
    if door in ("yaml", "toml", "json") and f"job.{door}" not in said.splitlines()[0]:
        return "no file"
    if door in ("yaml", "toml", "json") and f"job.{door}, line " not in said.splitlines()[0]:
        return "no line"
    if door in OF_PEOPLE:
        return "" if f"--{field.option}" in said else "no option"
    name = field.path.rpartition(".")[2]
    return "" if name in said or (door == "python" and field.keyword in said) else "no field"


#: what needs nothing beside it in truth: these make what they are in
APART_ALONE: Final = ("gpu.", "service.", "resources.")


def test_what_would_not_be_used_is_refused_by_its_name_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Each field that needs another one, without it, through each door."""
    wrong, tried = [], 0
    for field in FIELDS:
        if not field.needs or (field.path.startswith(APART_ALONE) and field.path != "service.awake_s"):
            continue
        kept = () if field.path != "service.awake_s" else alone(field, field.good[0]).said[:2]
        asked = Drawn((*kept, (field, field.good[0])))
        tried += 1
        for name, door in doors_of(asked).items():
            try:
                door(asked, capsys)
            except (MoorageError, Refusal) as refused:
                told = str(refused).lower()
                needed = [path.rpartition(".")[2] for path in field.needs]
                if (why := unnamed(field, name, refused)) or not any(
                    each in told or each.replace("_", "-") in told for each in needed
                ):
                    wrong.append(f"{field.path} {name}: {why}: {told}")
            else:
                wrong.append(f"{field.path} {name}: taken")
    assert not wrong, "\n".join(wrong)
    assert tried >= 8


@pytest.mark.parametrize(
    "seeds",
    [range(FEW), pytest.param(range(FEW, MANY), marks=(pytest.mark.slow, pytest.mark.long))],
    ids=["few", "many"],
)
def test_a_request_with_all_that_goes_together_is_the_same_through_each_door(
    seeds: range, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in seeds:
        asked = drawn(seed)
        told = {door: asked_for(asked, take(asked, capsys)) for door, take in doors_of(asked).items()}
        spoken = asked.of_options()
        told_of_people = {door: asked_for(spoken, take(spoken, capsys)) for door, take in doors_of(spoken).items()}
        assert all(each == told["wire"] for each in told.values()), (seed, asked)
        assert all(each == told_of_people["wire"] for each in told_of_people.values()), (seed, asked)


def test_a_job_in_a_container_without_an_image_is_told_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    """It was told to take a driver that runs images, which it had."""
    with pytest.raises(Refusal, match=r"fix: name the image: .*--image"):
        _dry(capsys, "--driver=docker", "--", "true")
    with pytest.raises(Refusal, match="fix: give a driver that runs images"):
        _dry(capsys, "--image=a:1", "--", "true")


def test_requests_of_worlds_have_fields_beside_that_decide_nothing() -> None:
    first = {path.partition(".")[0] for path in BESIDE} - {"run"}
    met = set[str]()
    for seed in range(60):
        body = {"job": f"j{seed}", "gpu": {"count": 2}, "run": {"argv": ["a"], "env": {"LINES": "3"}}}
        made = beside(body)
        decode_request(encode(made))
        assert beside(body) == made, "drawn by the request itself"
        assert {name: value for name, value in made.items() if name not in (*first, "run")} == {
            "job": f"j{seed}", "gpu": {"count": 2},
        }  # fmt: skip
        assert made["run"]["argv"] == ["a"]
        assert made["run"]["env"].items() >= {"LINES": "3"}.items()
        met |= made.keys() | ({"env"} if len(made["run"]["env"]) > 1 else set())
    assert met >= first | {"env"}


def test_what_no_worker_could_run_is_refused_at_each_door_and_waits_on_the_wire_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was refused to the command, and waited for ever as Python sent it."""
    unsaid = Drawn(())
    told = {name: door(unsaid, capsys).on_no_match for name, door in {**OF_PEOPLE, "json": by_json}.items()}
    assert told == dict.fromkeys(told, "reject")
    assert by_wire(unsaid, capsys).on_no_match == "wait", "as the durable queue takes it"

    async def by_client() -> None:
        async with AsyncClient(transport=SimFleet("1xL4")) as client:
            for what, gpu in ((["true"], "1xH100"), ({"run": {"argv": ["true"]}, "gpu": {"model": "H100"}}, None)):
                with pytest.raises(Rejected, match="no known worker could ever run this"):
                    await client.submit(what, gpu=gpu)

    SimulatedClock().run(by_client())


def test_each_field_twice_is_refused_in_each_file_and_on_the_wire(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for name in sorted({field.path.partition(".")[0] for field in FIELDS} - {"run"}):
        body = f'{{"run": {{"argv": ["x"]}}, "{name}": null, "{name}": null}}'
        for door, take in TWICE.items():
            try:
                take(body, capsys)
            except (Refusal, MoorageError) as refused:
                if "twice" not in str(refused) or name not in str(refused):
                    wrong.append(f"{name} {door}: {refused}")
            else:
                wrong.append(f"{name} {door}: taken")
    assert not wrong, "\n".join(wrong)


def _twice_in(file: str) -> Callable[[str, Any], Any]:
    def take(body: str, capsys: Any) -> Request:
        Path(file).write_text(body)
        return _dry(capsys, "-f", file)

    return take


def _read_by_a_scheduler(body: bytes) -> None:
    if name := named_twice(body):
        raise Refusal(f"{name} twice")


#: doors at which text is read, with one field twice
TWICE: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "json": _twice_in("twice.json"),
    "yaml": _twice_in("twice.yaml"),
    "wire": lambda body, _: _read_by_a_scheduler(body.encode()),
}
