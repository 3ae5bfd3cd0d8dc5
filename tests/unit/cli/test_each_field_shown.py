"""What a request says is what `show` and the page say, in its unit; so is what `change` set, and what `again` and
`submit --instead-of` take along."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec
import pytest

from moorage.cli.jobs import show
from moorage.cli.jobs.flag_values import retry
from moorage.cli.jobs.instead import changed
from moorage.cli.jobs.job_flags import NO_FLAGS
from moorage.cli.page.draw import facts_of
from moorage.client.answers import JobInfo
from moorage.client.durations import seconds
from moorage.client.reading import as_struct
from moorage.scheduler.answers import views
from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.questions.agains import Agains, again_asked
from moorage.schemas.frames import AgainAnswer
from moorage.schemas.gpu import parse_token
from moorage.schemas.job import GroupSpec, Request
from moorage.schemas.operate import ChangeAsked
from moorage.schemas.units import size_bytes
from moorage.testing.requests import FIELDS, Drawn, alone, drawn, values_of, with_value
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving, wire

Rows = Mapping[str, str]
Reader = Callable[[str], Any]


def split(text: str) -> list[str]:
    """The words of a row; JSON's quotes stand around what is not printable."""
    quoted = re.compile(r'(?:^|(?<= ))"(?:[^"\\]|\\.)*"(?= |$)')
    odd = [json.loads(found[0]) for found in quoted.finditer(text)]
    return [odd.pop(0) if word == "\0" else word for word in shlex.split(quoted.sub("\0", text))]


def pairs(text: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in split(text))


def part(pattern: str, kind: Reader = str) -> Reader:
    """Read a part of a row; None if it is not there."""

    def read(text: str) -> Any:
        found = re.search(pattern, text)
        return None if found is None else kind(found[1])

    return read


def flag(pattern: str) -> Reader:
    return lambda text: re.search(pattern, text) is not None


def _ready(text: str) -> Any:
    check, _, times = text.partition(" within ")
    way, _, what = check.partition(":")
    within, _, rest = times.partition(", every ")
    every, _, lasting = rest.partition(", for ")
    found = {way: True if way == "call" else what, "within_s": seconds(within), "every_s": seconds(every)}
    return found | ({"for_s": seconds(lasting)} if lasting else {})


def _requests(text: str) -> dict[str, Any]:
    return {name: {"body": ""} | request for name, request in json.loads(text).items()}


def _enforced(text: str) -> dict[str, str]:
    return dict(re.findall(r"(memory|compute) kept (\w+)", text))


#: by path of a field: the row that shows it, and what reads the value of the field from there
READ: Final[Mapping[str, tuple[str, Reader]]] = {
    "job": ("job", str),
    "replicas": ("gpu", part(r"^(\d+)x(?=-|\d+x)", int)),
    "indices": ("numbers", str),
    "max_running": ("at once", int),
    "max_failed": ("failures", lambda text: None if text.startswith("never") else int(text.split()[0])),
    "priority": ("priority", int),
    "gpu": ("gpu", lambda text: msgspec.to_builtins(parse_token(re.sub(r"^\d+x(?=\d+x)", "", text))[1])),
    "gpu.vendor": ("gpu also", part(r"vendor (\w+)", lambda text: "" if text == "any" else text)),
    "gpu.min_compute_capability": ("gpu also", part(r"capability ([\d.]+)")),
    "gpu.prefer": ("gpu also", part(r"prefers to (\w+)")),
    "gpu.enforce": ("gpu also", _enforced),
    "gpu.topology": ("gpu also", part(r"joined by (\w+)")),
    "gpu.scheduling": ("gpu also", part(r"scheduling ([\w-]+)")),
    "gpu.distributed": (
        "gpu also",
        lambda text: {
            "backend": part(r"meet by (\w+)")(text),
            "master_port": part(r"on port (\d+)", int)(text),
        },
    ),
    "resources.cpu_milli": ("resources", part(r"([\d.]+) cores", lambda text: round(float(text) * 1000))),
    "resources.memory_mib": ("resources", part(r"(\d+[GM]i) of", lambda text: size_bytes(text) >> 20)),
    "resources.enforce": ("resources", part(r"(\w+) enforced")),
    "requires": ("requires", lambda text: {name: each.split(",") for name, each in pairs(text).items()}),
    "where": ("where", split),
    "prefers": ("prefers", split),
    "same": ("same", lambda text: [] if text == "any" else split(text)),
    "spread_over": ("spread over", str),
    "each_worker": ("each worker", lambda text: "once" if text == "once" else True),
    "driver_config": ("settings", json.loads),
    "groups": ("groups", lambda text: msgspec.convert(json.loads(text), list[GroupSpec])),
    "deadline_s": ("deadline", seconds),
    "start_within_s": ("starts within", seconds),
    "or_refuse": ("or refused", part(r"in (\d) of 10", lambda text: int(text) / 10)),
    "retries": ("retries", int),
    "repair_s": ("repair", seconds),
    "retries_on_lost": ("retries if lost", int),
    "fair_key": ("fair key", str),
    "fair_weight": ("its weight", int),
    "uses": ("uses", lambda text: {name: int(number) for name, number in pairs(text).items()}),
    "retry": ("retry", lambda text: [{"pause_s": None, **row} for row in retry(text.split())]),
    "on_partition": ("if cut off", str),
    "on_no_match": ("if none fits", lambda text: "wait" if text == "waits" else text),
    "labels": ("labels", pairs),
    "if_seq": ("if at record", int),
    "hold": ("from the start", lambda text: text == "on hold"),
    "preemptible": ("preemptible", lambda text: text == "yes"),
    "service": (
        "service",
        lambda text: {
            "name": text.partition(",")[0],
            "concurrency": part(r", ([\d,]+) (?:×|call)", lambda number: int(number.replace(",", "")))(text),
            "input_bytes": part(r"takes (\w+)", size_bytes)(text) or 1 << 26,
            "output_bytes": part(r"answers (\w+)", size_bytes)(text) or 1 << 26,
        },
    ),
    "service.models": ("service", part(r"serves ([^,]+(?:, m2)?)", lambda text: text.split(", "))),
    "service.batch": (
        "service",
        lambda text: {
            "most": part(r"× ([\d,]+) call", lambda number: int(number.replace(",", "")))(text),
            "wait_ms": part(r"waits (\d+)ms for others", int)(text) or 0,
        },
    ),
    "service.queue": (
        "service",
        lambda text: {
            "most": part(r"(\d+) may wait", int)(text),
            "wait_s": part(r"waits (\w+) for a place", seconds)(text) or 30.0,
        },
    ),
    "service.sleep_after_s": ("service", part(r"sleeps after (\w+)", seconds)),
    "service.wake_within_s": ("service", part(r"woken within (\w+)", seconds)),
    "service.sleep_by": ("service", part(r"by requests ({.*}})", _requests)),
    "service.awake_s": ("service", part(r"awake (\w+) at least", seconds)),
    "service.pack": ("service", flag(", packed")),
    "service.http": ("service", part(r"over HTTP ({.*?})", json.loads)),
    "instead_of": ("instead of", str),
    "qos": ("qos", str),
    "start_after_s": ("starts after", seconds),
    "again_of": ("again of", str),
    "person": ("person", str),
    "run.driver": ("driver", str),
    "run.argv": ("command", split),
    "run.env": ("env", pairs),
    "run.image": ("image", str),
    "run.cwd": ("folder", lambda text: split(text)[0]),
    "run.files": ("files", str),
    "run.keep": ("keeps", split),
    "run.checkpoint": ("checkpoint", lambda text: text.partition(",")[0]),
    "run.checkpoint_signal": ("checkpoint", part(r"(SIG\w+)")),
    "run.checkpoint_before_s": ("checkpoint", part(r"(\w+) before the end", seconds)),
    "run.checkpoint_every_s": (
        "checkpoint",
        lambda text: 0.0 if "at the end alone" in text else part(r", every (\w+)", seconds)(text),
    ),
    "run.checkpoint_step": ("checkpoint", part(r"step by (.*)$")),
    "run.data": ("data", pairs),
    "run.setup": ("setup", lambda text: split(text)[0] if text[0] == '"' else text),
    "run.setup_s": ("setup limit", seconds),
    "run.user": ("user", str),
    "run.timeout_s": ("time limit", seconds),
    "run.grace_s": ("grace", seconds),
    "run.stall_s": ("stall", part(r"after (\w+)", seconds)),
    "run.on_stall": ("stall", part(r"^(\w+)")),
    "run.restart": ("restart", lambda text: text.partition(",")[0]),
    "run.max_restarts": ("restart", part(r"at most (\d+)", int)),
    "run.restart_unready_s": ("restart", part(r"after (\w+) unready", seconds)),
    "run.ready": ("ready when", _ready),
    "run.ports": ("own ports", int),
    "run.stdin": ("stdin", str),
    "run.calls": ("calls services", lambda text: text == "yes"),
}
#: what a row of its own shows otherwise: while it waits, as a number, or in the fields that it is read as
APART: Final = {"after", "events", "run.items", "run.files_of", "template", "resource_requirements"}


def plain_of(request: Request) -> dict[str, Any]:
    """A request with all of its fields."""

    def whole(value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            return {field.name: whole(getattr(value, field.name)) for field in msgspec.structs.fields(value)}
        if isinstance(value, dict):
            return {name: whole(each) for name, each in value.items()}
        return [whole(each) for each in value] if isinstance(value, list | tuple) else value

    return dict(whole(request))


def at(body: Any, path: str) -> Any:
    for name in path.split("."):
        body = body.get(name) if isinstance(body, dict) else None
    return body


def unlike(rows: Rows, asked: Drawn, request: Request) -> list[str]:
    """Return what of a request is not shown as it is."""
    plain, wrong = plain_of(request), []
    for field, value in asked.said:
        if field.path in APART:
            continue
        title, read = READ["run.env" if field.option == "secret" else field.path]
        wanted = at(plain, field.path)
        if field.option == "secret" or (
            field.path == "run.env" and not any(isinstance(v, str) for v in wanted.values())
        ):
            title, wanted = "secrets", {k: v["secret"] for k, v in wanted.items() if isinstance(v, dict)}
        elif field.path == "run.env":
            wanted = {name: each for name, each in wanted.items() if isinstance(each, str)}
        if field.path == "on_no_match" and wanted == "reject":
            continue
        text = rows.get(title)
        if text is None:
            if value.wire not in (0, 50, "job"):
                wrong.append(f"{field.path} {value.wire!r} is not shown")
            continue
        found = read(text)
        if isinstance(wanted, dict) and isinstance(found, dict):
            wanted = {name: wanted[name] for name in found if name in wanted}
            found = {name: each for name, each in found.items() if name in wanted}
        wanted = request.groups if field.path == "groups" else wanted
        if field.path == "gpu":
            found, wanted = msgspec.convert(found, type(request.gpu)), request.gpu
            keep = ("count", "model", "min_memory_mib", "sharing")
            found, wanted = ([getattr(each, name) for name in keep] for each in (found, wanted))
        if found != wanted:
            wrong.append(f"{field.path}: asked for {wanted!r}, shown as {found!r} in {title!r}: {text!r}")
    return wrong


def rows_of(shown: JobInfo) -> dict[str, str]:
    return dict(line.partition("\t")[::2] for line in show.job_words(shown).partition("\n\n")[0].splitlines())


def page_rows(shown: JobInfo) -> dict[str, str]:
    rows = {name: str(value) for name, value in facts_of(shown) if value not in (None, "")}
    return {**rows, "gpu": rows.get("asks", ""), "job": shown.job}


def told(drive: Driving, job: str) -> JobInfo:
    return as_struct(JobInfo, wire(views.show(drive.engine, "t", job)))


def submitted(drive: Driving, asked: Drawn, name: str) -> tuple[Drawn, Request]:
    """Submit what was drawn, so that it waits; return what of it was asked for, and its request as it is kept."""
    said = tuple(each for each in asked.said if each[0].path not in ("job", "if_seq", "after", "instead_of"))
    asked = Drawn(said)
    answer = drive.submit(name, **{**with_value(asked.body, "requires", {"nowhere": ["x"]}), "on_no_match": "wait"})
    assert answer["kind"] == "accepted", (answer, asked)
    request = told(drive, name).request
    assert request is not None
    return Drawn(tuple(each for each in said if each[0].path != "on_no_match")), request


@pytest.fixture(autouse=True)
def knows_next(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def next_level() -> Driving:
    """A fleet whose ledger has every field's level."""
    drive = Driving.with_hosts(1)
    raise_level(drive)
    return drive


def test_every_field_has_a_row() -> None:
    assert {field.path for field in FIELDS} == READ.keys() | APART


def test_each_value_is_shown_as_it_was_asked_for() -> None:
    wrong = []
    for field, value, is_good in values_of():
        if is_good and field.path not in ("job", "if_seq", "after", "instead_of"):
            drive = next_level()
            asked, request = submitted(drive, alone(field, value), "drawn")
            shown = told(drive, "drawn")
            wrong += unlike(rows_of(shown), asked, request) + [
                f"page: {each}" for each in unlike(page_rows(shown), asked, request)
            ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 300), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_what_was_asked_for_and_changed_is_shown_and_taken_along(seeds: range) -> None:
    wrong = []
    for seed in seeds:
        drive = next_level()
        asked, request = submitted(drive, drawn(seed), "drawn")
        wrong += [f"{seed}: {each}" for each in unlike(rows_of(told(drive, "drawn")), asked, request)]
        wrong += [f"{seed}, page: {each}" for each in unlike(page_rows(told(drive, "drawn")), asked, request)]
        bounds = {"priority": 7, "timeout_s": 5432.0}
        if request.copies > 1 and not request.is_gang and request.scale is None:
            bounds["max_running"] = 3
        drive.engine.offer(ChangeOrder("t", msgspec.convert({"job": "drawn", **bounds}, ChangeAsked), "change", True))
        drive.tick()
        answer = drive.answers.pop("change")
        if answer["kind"] != "answer":  # as with a checkpoint's signal that would come too late
            continue
        rows = rows_of(told(drive, "drawn"))
        assert (rows["priority"], rows["time limit"]) == ("7", "1h30m32s"), seed
        assert "max_running" not in bounds or rows["at once"] == "3", seed
        again = Agains(drive.engine, cast(Any, None)).ask("t", again_asked({"job": "drawn"}), "reply", True)
        assert isinstance(again, AgainAnswer), seed
        instead = changed(told(drive, "drawn").asked, NO_FLAGS, (), {}, {}, {"job": "new"})
        for taken in (msgspec.convert(again.request, Request), instead):
            assert (taken.priority, taken.workload.timeout_s) == (7, 5432.0), seed
            assert "max_running" not in bounds or taken.max_running == 3, seed
    assert not wrong, "\n".join(wrong)
