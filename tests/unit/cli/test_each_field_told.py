"""What a request says is what `ls` and `explain` say of it, and what an agent gives the tools of `mcp` is what they
tell."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec
import pytest

from moorage.cli.jobs.explain import explained_rows
from moorage.cli.jobs.job_rows import COLUMNS, job_row
from moorage.cli.study.mcp import server_of
from moorage.client import AsyncClient
from moorage.client.durations import seconds
from moorage.scheduler.answers import listing, waiting
from moorage.schemas.answers.jobs import Explained, JobRow
from moorage.schemas.gpu import format_token
from moorage.schemas.job import Request
from moorage.testing import SimFleet
from moorage.testing.requests import FIELDS, Drawn, Value, alone, drawn, values_of
from tests.levels import know_next
from tests.scenes import in_virtual_time
from tests.unit.cli.test_each_field_shown import next_level, submitted
from tests.unit.scheduler.driving import Driving, wire

#: fields that a row of `ls`, or `explain`, says
TOLD: Final = ("gpu", "gpu.", "priority", "labels", "replicas", "indices", "start_after_s", "run.items")


@pytest.fixture(autouse=True)
def _knows_next(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def unlike(drive: Driving, asked: Drawn, request: Request, job: str) -> list[str]:
    """Return what of a request `ls` and `explain` say otherwise."""
    row = msgspec.convert(wire(listing.labelled(drive.engine, drive.job(job))), JobRow)
    why = msgspec.convert(wire(waiting.explain_job(drive.engine, "t", job)), Explained)
    cells = dict(zip(COLUMNS, job_row(row), strict=True))
    rows = {name: str(value) for name, value in explained_rows(why) if value}
    token = format_token(request.effective_gpu, request.copies)
    if request.groups:  # a gang of unlike groups is told as each of them
        token = "+".join(format_token(each.gpu, each.replicas) for each in request.groups)
    wrong = []
    for what, found, wanted in (
        ("ls GPU", cells["GPU"], token),
        ("ls PRI", cells["PRI"], request.priority),
        ("ls labels", row.labels, request.labels),
        ("ls replicas", 1 if row.replicas is None else row.replicas.of, request.copies),
        ("explain asks", rows["asks"], token),
        ("explain waiting", why.waiting_replicas, request.copies),
        ("explain priority", why.priority if why.priority is not None else request.priority, request.priority),
    ):
        if request.each_worker and what in ("ls replicas", "explain waiting"):
            continue  # of such a job as many wait as workers are here that fit
        if found != wanted:
            wrong.append(f"{what}: {wanted!r} is told as {found!r}")
    if request.start_after_s:
        starts_ms = drive.job(job).accepted_ms + round(request.start_after_s * 1000)
        if (row.not_before_ms, why.not_before_ms) != (starts_ms, starts_ms):
            wrong.append(f"start at {starts_ms}: told as {row.not_before_ms} and {why.not_before_ms}")
        if "not before" not in str(cells["WHY"]) and not row.after:
            wrong.append(f"ls WHY: {cells['WHY']}")
    return [f"{each}: {asked.body}" for each in wrong]


def test_each_value_that_ls_and_explain_tell_is_as_it_was_asked_for() -> None:
    wrong = []
    for field, value, is_good in values_of():
        if is_good and field.path.startswith(TOLD) and field.path != "job":
            drive = next_level()
            asked, request = submitted(drive, alone(field, value), "drawn")
            wrong += unlike(drive, asked, request, "drawn")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 300), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_what_was_asked_for_is_what_ls_and_explain_tell(seeds: range) -> None:
    wrong = []
    for seed in seeds:
        drive = next_level()
        wrong += [f"{seed}: {each}" for each in unlike(drive, *submitted(drive, drawn(seed), "drawn"), "drawn")]
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------------ agents

#: the arguments of the tool `submit`, by the path of the field that each sets
ARGUMENTS: Final = {"run.argv": "command", "gpu": "gpu", "job": "job", "run.timeout_s": "limit"}


def argument(path: str, value: Value) -> Any:
    """A value as the tool takes it; None if it has no such form."""
    if path == "run.argv":
        return value.wire
    return value.texts[0] if value.texts and len(value.texts) == 1 and value.texts[0] else None


class Agent:
    """An agent that calls the tools of a client."""

    def __init__(self, client: AsyncClient) -> None:
        self._server = server_of(client, operates=True)

    async def ask(self, tool: str, **arguments: Any) -> Any:
        """Return the answer; the error as text if it is refused."""
        try:
            result = await self._server.call_tool(tool, arguments)
        except Exception as error:
            return str(error)
        [content] = result.content  # type: ignore[union-attr]
        return json.loads(content.text)  # type: ignore[union-attr]


@in_virtual_time
async def test_what_an_agent_gives_is_what_its_tools_tell() -> None:
    wrong, number = [], 0
    async with AsyncClient(transport=SimFleet("2x8xH100")) as client:
        agent = Agent(client)
        for field in FIELDS:
            for value in (*field.good, *field.bad) if field.path in ARGUMENTS else ():
                given, name = argument(field.path, value), ARGUMENTS[field.path]
                if given is None:
                    continue
                number += 1
                arguments = {"command": ["true"], "job": f"j{number}"} | {name: given}
                made = await agent.ask("submit", **arguments)
                if value in field.bad:
                    names = {"gpu": ("gpu", "count"), "run.timeout_s": ("limit", "timeout_s", "duration")}
                    named = names.get(field.path, (field.path.rpartition(".")[2],))
                    if not isinstance(made, str) or not any(each in made.lower() for each in named):
                        wrong.append(f"{name}={given!r}: {made}")
                    continue
                if isinstance(made, str):
                    if "no known worker could ever run" not in made:
                        wrong.append(f"{name}={given!r}: {made}")
                    continue
                shown = await agent.ask("show", job=arguments["job"])
                asked = msgspec.convert(shown["request"], Request)
                [row] = (await agent.ask("ls", ids=arguments["job"]))["jobs"]
                why = await agent.ask("explain", job=arguments["job"])
                token, given_as = format_token(asked.effective_gpu, asked.copies), [arguments.get("gpu", "-")]
                given_as += [f"{given_as[0]}xany"]
                told = {
                    "command": list(asked.workload.argv) == arguments["command"],
                    "job": {shown["job"], row["job"], why["job"]} == {arguments["job"]},
                    "gpu": row["gpu"] == token and re.sub(r"^1x(?=\d)", "", token) in given_as,
                    "limit": asked.workload.timeout_s
                    == (seconds(arguments["limit"]) if "limit" in arguments else None),
                }
                wrong += [
                    f"{each} of {arguments}: {shown['request']} {token}" for each, is_so in told.items() if not is_so
                ]
    assert number > 30
    assert not wrong, "\n".join(wrong)
