"""`moorage use` and what `ls` and `show` say of use: as cells and lines, and of a real job on simulated GPUs."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
from msgspec.structs import replace

from moorage.cli.jobs.use import CELLS, UseRow, spark, use_cell, use_rows, use_table, use_words
from moorage.client import AsyncClient
from moorage.client.connected import Connected
from moorage.schemas.answers.jobs import Used
from moorage.schemas.frames import Answer, UsePage
from moorage.schemas.frames.use import UseLine
from tests.system.cli.node import Node, on_a_terminal, until_shown
from tests.waiting import until


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class _Posix(io.StringIO):
    encoding = "ascii"


def test_a_spark_line_goes_from_nothing_to_full_and_is_blank_where_nothing_was_read() -> None:
    assert spark([None, 0, 50, 100, 130], 100, _Terminal()) == " ▁▅██"
    assert spark([None, 0, 50, 100], 100, _Posix()) == " _=#", "an encoding without blocks"
    assert spark([0, 0], 0, _Terminal()) == "▁▁", "a device that does not tell its memory"


NAMED = {"job": "j", "tenant": "t", "state": "RUNNING"}


def test_a_cell_of_ls_has_the_least_and_the_most_used_gpu() -> None:
    used = Used(devices=4, percent=72, percent_min=0, percent_max=97, memory_mib=240844)
    assert use_cell(used) == "0-97%"
    assert use_cell(replace(used, percent_min=97)) == "97%"
    assert use_cell(None) == "-"
    assert use_words(used) == "0-97% of 4 GPUs, 240844 MiB"


def row(replica: int, percent: int | None) -> UseRow:
    line = UseLine(3, "GPU-1", "H100", 81559, [percent] * CELLS, [60211] * CELLS, [None] * CELLS)
    return UseRow(replica, UsePage(replica, 1, 20.0, [line], "node-7"), line)


def test_both_lines_and_their_numbers_fit_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = use_table([row(0, 100), row(1023, None)], _Terminal()).splitlines()
    assert all(len(line) <= 80 for line in lines if "\x1b" not in line)
    assert lines[-2].split() == ["0/3", "█" * CELLS, "100", "▆" * CELLS, "60211"]
    assert lines[-1].split() == ["1023/3", "-", "▆" * CELLS, "60211"]
    assert use_table([], _Terminal()).startswith("nothing is measured")


@pytest.mark.slow
async def test_a_running_job_is_shown_with_its_use_and_an_ended_one_is_refused(node: Node, unique: str) -> None:
    await node.run("submit", "--gpu", "2xH100", "--job", "j", "--", "sleep", "600", tenant=unique)

    async def is_read() -> bool:
        listed = (await node.run("ls", "--json", tenant=unique)).frame["data"]["jobs"]
        return any("use" in job for job in listed)

    await until(is_read, deadline_s=60, what="a renewal brings what the job uses")
    frame = (await node.run("use", "j", "--json", tenant=unique)).frame
    assert (frame["kind"], frame["job"], len(frame["rows"])) == ("use", "j", 2)
    told = await node.run("use", "j", tenant=unique)
    header, *rows = told.rows
    assert header == ["AT", "WORKER", "WATTS", "USE", "%", "MEMORY", "MIB", "OF"]
    assert len(rows) == 2
    assert all(" sim" in each[1] for each in rows), "simulated GPUs say so"
    listed = await node.run("ls", tenant=unique)
    assert dict(zip(*listed.rows, strict=True))["USE"] == "0%"
    assert "0% of 2 GPUs" in (await node.run("show", "j", tenant=unique)).out
    await node.run("cancel", "j", tenant=unique)
    await node.run("wait", "j", tenant=unique)
    ended = await node.run("use", "j", tenant=unique)
    assert "error[failed-precondition]" in ended.err


@pytest.mark.parametrize(("request_", "first"), [({"indices": "3,5", "replicas": 2}, 3), ({"replicas": 2}, 0), ({}, 0)])
async def test_of_a_job_of_which_nothing_runs_its_first_replica_is_asked(request_: dict[str, Any], first: int) -> None:
    """A job that `again --failed` made has none of number 0."""
    asked: list[int] = []

    class Waits:
        _wire = property(lambda self: self)

        async def answer(self, verb: str, words: dict[str, Any], tenant: str | None) -> Answer:
            if verb == "use":
                asked.append(words["replica"])
                return Answer(verb, 1, {"replica": words["replica"], "attempt": 1, "span_s": 0})
            return Answer(verb, 1, {**NAMED, "request": request_, "replica_states": []})

        read, show = Connected.read, Connected.show

    assert await use_rows(cast(AsyncClient, Waits()), "j", None) == []
    assert asked == [first]


async def test_a_watched_use_goes_on_while_no_attempt_runs(node: Node, unique: str) -> None:
    await node.run("submit", "--job", "first", "--driver", "noop", "--", "hang", tenant=unique)
    await node.run("submit", "--job", "j", "--after", "first:any", "--driver", "noop", "--", "hang", tenant=unique)
    async with on_a_terminal("use", "j", "--watch", env=node.env(unique)) as (process, terminal):
        await until_shown(terminal, "replica 0 of job j does not run now")
        await node.run("cancel", "first", tenant=unique)
        await until_shown(terminal, "nothing is measured")
        await node.run("cancel", "j", tenant=unique)
        await until_shown(terminal, "j has ended: CANCELLED")
        assert await process.wait() == 0
