"""Text for people: what a table looks like in a pipe and on a terminal."""

from __future__ import annotations

import io
import os
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from msgspec import convert

from moorage.cli.fleet import usage
from moorage.cli.fleet.workers import kept, model_words, packed, trouble_lines
from moorage.cli.framework.console import plain, print_err, print_error, print_out
from moorage.cli.framework.fields import filled
from moorage.cli.framework.render import Rows, age, day_and_time, facts, hours, table
from moorage.cli.framework.screen import Screen, cut
from moorage.cli.framework.wrapping import folded
from moorage.cli.jobs import job_rows, show, wait
from moorage.cli.jobs.job_rows import jobs_table
from moorage.cli.jobs.labelled import LINE_BYTES_MAX, Labelled
from moorage.cli.jobs.progress import Progress
from moorage.cli.jobs.replica_words import Eta, replica_words
from moorage.cli.jobs.show import (
    why_of,
)
from moorage.client.answers import JobInfo, explained_in
from moorage.client.errors import Rejected
from moorage.client.output import Piece
from moorage.client.reading import as_struct
from moorage.schemas.answers.fleet import DeviceRow, WorkerInfo
from moorage.schemas.answers.jobs import JobRow, ReplicaCounts, ShownJob
from moorage.schemas.answers.operators import UsageRow
from moorage.schemas.errors import problem
from moorage.schemas.frames import Change, Event, FleetRow, Replicas
from moorage.schemas.gpu import model_matches, parse_token
from moorage.schemas.operate import Limit, TenantRow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


HEADER = ["JOB", "STATE", "AGE", "WHY"]
ROWS: list[list[Any]] = [
    ["a-rather-long-job-id-that-is-never-cut", "RUNNING", "5s", "x" * 200],
    ["b", "QUEUED", "12m3s", None],
]


def test_in_a_pipe_cells_are_split_by_tabs_and_nothing_is_cut() -> None:
    text = table(HEADER, ROWS, numbers=("AGE",), stream=io.StringIO())
    assert [line.split("\t") for line in text.splitlines()] == [
        HEADER,
        ["a-rather-long-job-id-that-is-never-cut", "RUNNING", "5s", "x" * 200],
        ["b", "QUEUED", "12m3s", "-"],
    ]


def test_on_a_terminal_it_is_aligned_and_only_the_last_column_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    head, first, second = table(HEADER, ROWS, numbers=("AGE",), stream=Terminal()).splitlines()
    assert head.startswith("JOB" + " " * 37 + "STATE")
    assert first.endswith("…")
    assert len(first) == 80
    assert "a-rather-long-job-id-that-is-never-cut" in first
    assert second.split() == ["b", "QUEUED", "12m3s", "-"]
    assert head.index("AGE") + 3 == second.index("12m3s") + 5  # numbers to the right


def test_colour_is_for_states_and_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    head, first, _ = table(HEADER, ROWS, stream=Terminal()).splitlines()
    assert head.startswith("\x1b[2m")
    assert "\x1b[32mRUNNING\x1b[0m" in first
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in table(HEADER, ROWS, stream=Terminal())


def test_rows_that_come_one_by_one_keep_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    rows = Rows(HEADER, numbers=("AGE",), stream=Terminal())
    assert rows.line(["j", "RUNNING", "5s", ""]).splitlines() == ["JOB  STATE    AGE  WHY", "j    RUNNING   5s  -"]
    assert rows.line(["longer", "QUEUED", "12m3s", "x" * 40]) == "longer  QUEUED   12m3s  " + "x" * 15 + "…"
    assert rows.line(["j", "QUEUED", "1s", "y"]) == "j       QUEUED      1s  y", "as wide as it ever was"
    rows = Rows(HEADER, stream=io.StringIO())
    assert rows.line(["j", "RUNNING", None, "a\nb"]) == "j\tRUNNING\t-\ta b", "in a pipe without a header"


def test_rows_begin_as_wide_as_they_will_be_and_a_narrow_terminal_does_without_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    rows = Rows(HEADER, optional=("AGE",), widths={"JOB": 9, "STATE": 9}, stream=Terminal())
    head, first = rows.line(["j", "RUNNING", "5s", "why"]).splitlines()
    assert head.index("WHY") == first.index("why") == rows.line(["longer", "CANCELLED", "1h", "why"]).index("why") == 27
    monkeypatch.setenv("COLUMNS", "38")
    rows = Rows(HEADER, optional=("AGE",), widths={"JOB": 9, "STATE": 9}, stream=Terminal())
    assert rows.line(["j", "RUNNING", "5s", "why"]).splitlines() == [
        "JOB        STATE      WHY (no AGE)",
        "j          RUNNING    why",
    ]
    assert rows.line(["j", "QUEUED", "6s", "x"]) == "j          QUEUED     x"


def test_the_header_comes_with_the_first_row_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    rows = Rows(HEADER, optional=("AGE",), widths={"STATE": 19}, stream=Terminal())
    for _ in range(2):
        assert rows.line(["a-rather-long-job-id-that-is-never-cut", "FAILED", "5s", "exit"]).splitlines() == [
            "a-rather-long-job-id-that-is-never-cut", "  STATE  FAILED", "  AGE    5s", "  WHY    exit"
        ]  # fmt: skip
    assert rows.line(["b", "SUCCEEDED", "6s", "x"]).splitlines() == [
        "JOB  STATE                WHY (no AGE)",
        "b    SUCCEEDED            x",
    ]
    assert rows.line(["c", "FAILED", "7s", "y"]) == "c    FAILED               y"


def test_a_last_column_that_wraps_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    why = "cancelled by tenant:default, said ana: superseded " + "x" * 40
    text = table(["STATE", "AGE", "WHY"], [["RUNNING", "5s", why]], optional=("AGE",), wraps=True, stream=Terminal())
    _, *lines = text.splitlines()
    assert max(map(len, lines)) <= 40
    assert {line[:9] for line in lines[1:]} == {" " * 9}
    assert "".join(line[9:] for line in lines).replace(" ", "").removeprefix("5s") == why.replace(" ", "")


def test_wide_letters_take_two_columns_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "31")
    header, why = ["JOB", "STATE", "WHY"], "用了太多的显卡而且没有人知道为什么"
    cells = [["名字", "RUNNING", why], ["b", "QUEUED", "full"]]
    first, *_, last = lines = ["JOB   STATE    WHY", "名字  RUNNING  用了太多的显卡…", "b     QUEUED   full"]
    assert table(header, cells, stream=Terminal()).splitlines() == lines
    rows = Rows(header, stream=Terminal())
    assert "\n".join(map(rows.line, cells)).splitlines() == lines
    assert table(header, cells, wraps=True, stream=Terminal()).splitlines() == [
        first, "名字  RUNNING  用了太多的显卡而", " " * 15 + "且没有人知道为什", " " * 15 + "么", last
    ]  # fmt: skip
    shortened = table(["NAME", "STATE"], [["名字" * 10, "x" * 12]], shortened=("NAME",), stream=Terminal())
    assert shortened.splitlines()[1] == "名字名字…名字名字  " + "x" * 12


def test_a_moment_to_come_has_its_day() -> None:
    now = datetime(2026, 11, 22, 21, 48, tzinfo=UTC)
    for ahead, said in ((2, "today 23:48"), (23, "tomorrow 20:48"), (47, "2026-11-24 20:48")):
        assert day_and_time(now + timedelta(hours=ahead), now) == said


def test_output_of_replicas_comes_in_whole_lines_with_the_replica_before_each() -> None:
    made = Labelled()
    assert made.lines((0, 1, "out"), b"loss 0", end=False) == b""
    assert made.lines((1, 1, "out"), b"one\ntwo\n", end=False) == b"[1] one\n[1] two\n"
    assert made.lines((0, 1, "out"), b".7\nmore", end=False) == b"[0] loss 0.7\n"
    assert made.lines((0, 1, "err"), b"no end", end=True) == b"[0] no end\n"
    assert list(made.rest()) == [("out", b"[0] more\n")]
    assert list(made.rest()) == []
    long = made.lines((2, 1, "out"), b"x" * (LINE_BYTES_MAX + 1), end=False)
    assert len(long) == len(b"[2] \n") + LINE_BYTES_MAX
    assert list(made.rest()) == [("out", b"[2] x\n")]


def test_updates_of_progress_bars_have_the_replica_each() -> None:
    made = Labelled()
    bar, other = (0, 1, "err"), (1, 1, "err")
    assert made.lines(bar, b"\r  0%", end=False) == b""
    assert made.lines(bar, b"\r  5%", end=False) == b"[0]   0%\r"
    assert made.lines(other, b" 9%\r", end=False) == b"[1]  9%\r"
    assert made.lines(bar, b"\r 10%\n", end=False) == b"[0]   5%\r[0]  10%\n"
    assert made.lines(other, b"10%\r\n", end=False) == b"[1] 10%\r\n"
    assert made.lines(other, b"11%\r", end=False) + made.lines(other, b"\nnext\n", end=False) == (
        b"[1] 11%\r\n[1] next\n"
    ), "CR LF in two pieces is one end of a line"
    assert made.lines(other, b"\n", end=False) == b"[1] \n"


def test_an_unfinished_line_is_written_after_a_second_and_never_cuts_a_character() -> None:
    now_s = 0.0
    made = Labelled(lambda: now_s)
    source = (0, 1, "out")
    assert made.lines(source, "password: né".encode()[:-1], end=False) == b""
    now_s = 0.9
    assert list(made.overdue()) == []
    now_s = 1.0
    assert list(made.overdue()) == [("out", b"[0] password: n\n")]
    assert list(made.overdue()) == []
    assert made.lines(source, "é\n".encode()[1:], end=False) == "[0] é\n".encode()
    long = made.lines(source, b"x" + "€".encode() * LINE_BYTES_MAX, end=True)
    assert set(long.decode()) == set("[0] x€\n")


def test_facts_without_a_value_are_left_out() -> None:
    assert facts([("job", "a"), ("why", ""), ("code", 0)], io.StringIO()) == "job\ta\ncode\t0"


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (None, "-"),
        (0, "0ms"),
        (850, "850ms"),
        (12_000, "12s"),
        (192_000, "3m12s"),
        (7_800_000, "2h10m"),
        (3_600_000, "1h"),
        (3 * 86_400_000 + 4 * 3_600_000, "3d4h"),
    ],
)
def test_ages(milliseconds: float | None, text: str) -> None:
    assert age(milliseconds) == text


def test_a_narrow_terminal_does_without_optional_columns_and_never_cuts_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "62")
    head, first, _ = table(HEADER, ROWS, optional=("AGE", "STATE"), stream=Terminal()).splitlines()
    assert head.split() == ["JOB", "STATE", "WHY", "(no", "AGE)"]
    assert first.startswith("a-rather-long-job-id-that-is-never-cut")
    assert len(first) == 62
    monkeypatch.setenv("COLUMNS", "40")
    lines = table(HEADER, ROWS, optional=("AGE", "STATE"), stream=Terminal()).splitlines()
    assert lines[:3] == ["a-rather-long-job-id-that-is-never-cut", "  STATE  RUNNING", "  AGE    5s"]
    assert lines[-3:] == ["JOB b", "  STATE  QUEUED", "  AGE    12m3s"], "what says nothing has no line"
    assert max(map(len, lines)) <= 40
    row = Rows(HEADER, optional=("AGE",), stream=Terminal()).line(ROWS[0]).splitlines()
    assert row == lines[: len(row)], "the same where rows come one by one"
    assert table(HEADER, ROWS, optional=("AGE",), stream=io.StringIO()).splitlines()[0] == "\t".join(HEADER)


def test_what_is_drawn_again_is_never_wider_or_higher_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "6")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    screen = Screen(stream)
    assert screen.live
    screen.draw([f"{at} " + "x" * 40 for at in range(3)], tail=["the end"])
    screen.draw([f"{at} " + "x" * 40 for at in range(30)], tail=["the end"], unseen=1000)
    first, second = stream.getvalue().split("\x1b[4F\x1b[J")
    assert first.splitlines() == [f"{at} " + "x" * 17 + "…" for at in range(3)] + ["the end"]
    assert [line[:2] for line in second.splitlines()] == ["0 ", "1 ", "2 ", "… ", "th"]
    assert second.splitlines()[3] == "… and 1,027 more"
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen(stream).live
    assert not Screen(io.StringIO()).live


def test_a_line_is_cut_with_its_colours_ended() -> None:
    red = "\x1b[31mred\x1b[0m and more"
    assert cut(red, 80) == red
    assert cut(red, 8) == "\x1b[31mred\x1b[0m and…\x1b[0m"
    assert cut("plain", 3) == "pl…"
    assert cut("取消任务", 8) == "取消任务"
    assert [cut("\x1b[31m取消任务\x1b[0m", columns) for columns in (7, 6)] == [
        "\x1b[31m取消任…\x1b[0m", "\x1b[31m取消…\x1b[0m"
    ]  # fmt: skip
    assert cut("e\u0301te\u0301 la", 5) == "e\u0301te\u0301 …", "an accent of its own takes no column"


def test_many_workers_stand_several_in_a_line() -> None:
    workers = [FleetRow(f"n{at:02}", "up" if at else "draining", "····") for at in range(7)]
    assert packed(workers, 42, 20)[0] == [
        "n00 ···· draining  n04 ····",
        "n01 ····           n05 ····",
        "n02 ····           n06 ····",
        "n03 ····",
    ]
    assert len(packed(workers, 10, 20)[0]) == 7


def test_a_full_disk_has_one_line_for_all_drivers() -> None:
    why = "disk-full: no room on the disk of /state"
    down = [{"driver": driver, "why": why, "for_s": 61} for driver in ("docker", "process")]
    row = {
        "worker": "w1",
        "state": "up",
        "drivers_down": down,
        "warning": "disk: 100 % of the disk of /state are in use",
    }
    full, warning = trouble_lines([convert(row, WorkerInfo)])
    assert full == f"w1: {why}, since 1m1s"
    assert warning == "w1: disk: 100 % of the disk of /state are in use"


def test_an_agent_that_was_stopped_has_one_line_without_a_time() -> None:
    why = "agent-stopped: its jobs run on; it takes jobs again once its agent is started"
    down = [{"driver": driver, "why": why} for driver in ("docker", "process")]
    assert trouble_lines([convert({"worker": "w1", "state": "up", "drivers_down": down}, WorkerInfo)]) == [f"w1: {why}"]


def test_a_fleet_without_room_shows_what_wants_a_look_first_and_counts_the_rest() -> None:
    workers = [FleetRow(f"n{at:03}", "up", "····") for at in range(100)]
    workers[70] = FleetRow("n070", "up", "··!·")
    workers[90] = FleetRow("n090", "stale", "····")
    lines, unseen = packed(workers, 40, 6)
    assert len(lines) == 5  # and one says how many are not shown
    shown = " ".join(lines)
    assert lines[0].startswith("n070 ··!·")
    assert "n090 ···· stale" in shown
    assert unseen == 100 - len(re.findall(r"n\d{3}", shown))
    assert packed(workers[:4], 40, 6)[1] == 0


def test_a_model_has_a_word_that_means_no_other() -> None:
    names = [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA A10",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA GeForce RTX 4090",
        "AMD Instinct MI300X",
        "Simulated",
    ]
    words = model_words(names)
    assert list(words.values()) == ["H100", "A10", "A100", "=4090", "MI300X", "Simulated"]
    for name, word in words.items():
        _, spec = parse_token(f"2x{word}")
        assert [other for other in names if model_matches(spec.models[0], other)] == [name]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{job} {state}", "a RUNNING"),
        ("{job:<4}|{code}", "a   |-"),
        ("{changes.0.code}", "139"),
        ("{gpus.1}", "y"),
        ("{request.run.argv}", '["true"]'),
        ("{{}}\\t{simulated}", "{}\ttrue"),
    ],
)
def test_a_format_is_filled_with_fields_as_json_has_them(template: str, text: str) -> None:
    row = {
        "job": "a",
        "state": "RUNNING",
        "code": None,
        "changes": [{"code": -11}],
        "gpus": ["x", "y"],
        "request": {"run": {"argv": ["true"]}},
        "simulated": True,
    }
    assert filled(template, row) == text


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{jb}", "{job}"),
        ("{}", "--json"),
        ("{0}", "--json"),
        ("{job", "{job} {state}"),
        ("{job.__class__}", "--json"),
        ("{gpus.7}", "--json"),
        ("{job!x}", "{job} {state}"),
        ("{job:q}", "{job} {state}"),
        ("{request.rn}", "{request.run}"),
    ],
)
def test_a_format_that_is_none_is_told(template: str, says: str) -> None:
    with pytest.raises(Rejected) as told:
        filled(template, {"job": "a", "gpus": ["x"], "request": {"run": {}}})
    assert told.value.code == "invalid-argument"
    assert any(says in fix for fix in told.value.fixes)


def test_what_others_wrote_is_shown_and_not_obeyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker names its devices, a tenant its reasons: an operator's terminal does not do what they say."""
    evil = "\x1b[2J\x1b]0;mine\x07H100\x9b1A\u202e"
    shown = "\\x1b[2J\\x1b]0;mine\\x07H100\\x9b1A\\u202e"
    assert plain(evil) == shown
    assert plain("Größe\t·\n\x1b[31mred\x1b[0m") == "Größe\t·\n\x1b[31mred\x1b[0m"
    assert shown in table(["MODELS"], [[[evil]]])
    assert table(["A", "B"], [["x\ny", ["r\now"]]]).splitlines()[1] == "x y\tr ow"
    print_out(evil)
    print_err(evil)
    print_error(problem("not-found", evil, found=evil, next=evil))
    print_out("\x1b[31mgreen and SUCCEEDED")  # one of our own styles, of somebody else, where we paint nothing
    monkeypatch.setenv("TERM", "xterm")
    drawn = Terminal()
    Screen(drawn).draw([evil])
    out, err = capsys.readouterr()
    for text in (out, err, drawn.getvalue()):
        assert shown in text
        assert not set(text) & set("\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("columns", [32, 34, 40])
def test_no_row_is_wider_than_a_terminal_with_room_for_a_few_letters(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [["a-name-of-15-chr", "FAILED", "start-failed: there is no such program"]]
    assert max(map(len, table(["JOB", "STATE", "WHY"], rows, stream=Terminal()).splitlines())) <= columns
    text = Rows(["JOB", "STATE", "WHY"], stream=Terminal()).line(rows[0])
    assert max(map(len, text.splitlines())) <= columns


def test_an_error_has_at_most_three_fixes_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(problem("not-found", "no such job"), ("one", "two", "one", "", "three", "four"))
    fixes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fix:")]
    assert fixes == ["fix: one", "fix: two", "fix: three"]


@pytest.mark.parametrize(("message", "is_told"), [("--priority: priority must be 0..100", False), ("bad", True)])
def test_the_field_of_a_request_is_told_where_no_option_is(
    message: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    print_error(problem("invalid-argument", message, field="$.priority", next="give 0..100"))
    assert ("at $.priority" in capsys.readouterr().err) is is_told


@pytest.mark.parametrize(
    ("state", "why", "by", "said", "told"),
    [
        ("FAILED", "exit", "worker", "", "exit"),
        ("QUEUED", "", "", "", "-"),
        ("ACCEPTED", "", "tenant:acme", "ana", "-"),
        ("CANCELLING", "enough", "tenant:acme", "ana", "enough (tenant:acme (says ana))"),
        ("ENDING", "drain", "operator", "", "drain (operator, unverified)"),
        ("ENDING", "drain", "operator:ana", "root", "drain (operator:ana (says root))"),
        ("ENDING", "drain", "operator:ana", "ana", "drain (operator:ana)"),
        ("CANCELLING", "", "operator", "ben", "(operator, unverified (says ben))"),
    ],
)
def test_whose_act_it_was_stands_behind_the_reason(state: str, why: str, by: str, said: str, told: str) -> None:
    assert why_of(state, why, by, said) == told


def test_a_value_that_does_not_fit_beside_its_name_stands_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    text = facts([("output until", "2026-11-26T00:33:24Z on sim-0000"), ("state", "RUNNING")], stream=Terminal())
    assert text.splitlines() == ["output until", "  2026-11-26T00:33:24Z on", "  sim-0000", "state         RUNNING"]
    assert folded("sim  epoch 1  ledger 23  2 queued\n\nx", Terminal()) == "sim  epoch 1  ledger 23  2\nqueued\n\nx"
    assert folded("x" * 20 + " " + "y" * 20, io.StringIO()) == "x" * 20 + " " + "y" * 20, "a pipe has no width"


def row_of(data: dict[str, Any]) -> JobRow:
    return convert({"tenant": "t", **data}, JobRow)


def words_of(data: dict[str, Any]) -> str:
    return show.job_words(as_struct(JobInfo, data))


_LONG: Final = "evaluate-large-model-43-seed-7"


@pytest.mark.parametrize("columns", [80, 100])
def test_long_job_ids_cut_no_column_without_a_word_and_turn_no_table_into_cards(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    row = {
        "job": _LONG, "state": "SUCCEEDED", "gpu": "4x8xH100:80G", "priority": 60, "attempt": 2, "age_ms": 5_000,
        "code": 0, "worker": "sim-0001", "workers": 4, "simulated": True, "why": "a reason of some words",
    }  # fmt: skip
    monkeypatch.setattr("sys.stdout", Terminal())
    lines = jobs_table([row_of(row)]).splitlines()
    assert max(map(len, lines)) <= columns
    assert "SUCCEEDED" in lines[-1], "a table"
    gone = [name for name in job_rows.COLUMNS if name not in lines[0].partition("(")[0]]
    assert all(name in " ".join(lines[:-1]) for name in gone), "what is left out is said"
    table_of_events = wait._rows(14)
    cells = ["21:48:05.123", _LONG, "-", 1, "RUNNING", "sim-0000 sim", "-", 8, "-"]
    text = table_of_events.line(cells).splitlines()
    assert len(text[-1]) <= columns
    assert "RUNNING" in text[-1]
    assert text[-1].split()[1].startswith("evalua")
    assert text[-1].split()[1].endswith("seed-7"), "an id is cut in its middle"
    assert len(table_of_events.line(["21:48:05.123", "short", *cells[2:]]).splitlines()) == 1


def test_members_that_a_service_does_not_need_are_not_told_as_waiting() -> None:
    row = {"job": "s", "state": "RUNNING", "reason": "scaled", "waiting": 3}
    row["replicas"] = {"of": 4, "states": {"RUNNING": 1, "QUEUED": 3}}
    assert job_rows.why_cell(row_of(row)) == "running 1  at most 4"
    assert job_rows.why_cell(row_of({**row, "reason": "busy"})) == "running 1  waiting 3"


def test_the_table_of_usage_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    sums: dict[str, Any] = {"gpu_s": 36e5, "memory_mib_s": 3.6e12, "used_gpu_s": 36e5, "used_memory_mib_s": 3.6e12}
    row = UsageRow(tenant="a-tenant-of-some-length", model="NVIDIA H100 80GB HBM3", hour_ms=0, **sums)
    for by in (["tenant", "model"], ["tenant", "model", "hour"]):
        shown.seek(0)
        shown.truncate()
        usage._show(by, [row], 0)
        lines = shown.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[-1].endswith("976562.5"), "a number is never cut"


def test_an_error_breaks_no_word_and_no_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    command = "moorage submit --gpu 1xH100 --replicas 3 --job a-long-name -- python train.py"
    advice = "with a count any model may be named, and the environment of the worker decides"
    print_error(problem("invalid-argument", advice, next=""), (advice, command))
    lines = shown.getvalue().splitlines()
    assert f"fix: {command}" in lines, "it is pasted"
    prose = [line for line in lines if command not in line]
    assert max(map(len, prose)) <= 40
    words = set(advice.split())
    assert words <= set(" ".join(prose).split())


def test_a_format_may_name_a_field_that_has_its_default() -> None:
    """A script does not break by the state of the fleet."""
    assert filled("{tenant} {limit} {limit.gpus} {usage_milli}", TenantRow("a")) == "a - - 0"
    assert filled("{limit.gpus}", TenantRow("a", limit=Limit(3))) == "3"
    assert filled("{worker} {drain} {drain.why}", {"worker": "w"}) == "w - -"
    with pytest.raises(Rejected):
        filled("{limt}", TenantRow("a"))


@pytest.mark.parametrize(
    ("state", "code", "why", "shown"),
    [
        ("FAILED", 3, "", "it ended by itself, with code 3"),
        ("FAILED", -11, "", "it ended by itself, by signal 11 (SIGSEGV)"),
        ("FAILED", 1, "start-failed: no program x", "start-failed: no program x"),
        ("CANCELLED", -15, "end", ""),
        ("SUCCEEDED", 0, "", ""),
    ],
)
def test_an_end_that_nobody_asked_for_has_a_reason(state: str, code: int | None, why: str, shown: str) -> None:
    assert job_rows.ended_by_itself(state, code, why) == shown


@pytest.mark.parametrize(
    ("why", "said"),
    [("", "9 of 200 failed"), ("end", "9 of 200 failed"), ("gang: replica 1: code 3", "gang: replica 1: code 3")],
)
def test_the_end_of_many_replicas_is_how_many_failed_unless_it_has_a_reason(why: str, said: str) -> None:
    """show and the page said of a sweep that it ended by itself, with code 1."""
    counts = ReplicaCounts(of=200, states={"SUCCEEDED": 191, "FAILED": 9}, ended={"FAILED": "0-8"})
    shown = ShownJob(job="j", tenant="t", state="FAILED", rev=1, code=1, why=why, replicas=counts)
    assert job_rows.end_of(shown) == said
    runs = ShownJob(job="j", tenant="t", state="RUNNING", rev=1, replicas=counts)
    assert job_rows.end_of(runs) == "", "it has not ended"


def test_a_warning_of_the_worker_stays_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    progress = Progress("big")
    progress.event(Event("t", "big", 2, "PLACED", 1, [Change(2, 0, 0, 1, "PLACED", "w1")]))
    progress.output(Piece(0, 1, "err", 0, "", note="warning[memory]: counted, not enforced"))
    progress.event(Event("t", "big", 3, "RUNNING", 1, [Change(3, 0, 0, 1, "RUNNING", "w1")]))
    assert "\r\x1b[Kwarning[memory]: counted, not enforced\n" in screen.getvalue()


def test_a_line_of_many_small_steps_is_drawn_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of 300 MB had 609 lines in a second, over ssh too."""
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    progress = Progress("big")
    for step in range(1_000):
        progress.show_often(f"sent {step}", step / 1_000)
    assert 8 <= screen.getvalue().count("sent") <= 11


def test_beside_a_command_that_reads_its_output_progress_is_why_it_waits_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader of a pipe may write to the terminal at any moment, behind a line that is drawn again as well."""
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    reads, writes = os.pipe()
    with os.fdopen(reads), os.fdopen(writes, "w") as piped:
        monkeypatch.setattr("sys.stdout", piped)
        progress = Progress("big")
        progress.event(Event("t", "big", 1, "QUEUED", 1, [Change(1, 5000, -1, 0, "ACCEPTED")]))
        for position in (2, 1):
            why = {"reason": "busy", "means": "jobs lease them", "position": position, "queued": 2}
            progress.waiting(explained_in(why))
        [waits] = screen.getvalue().splitlines()
        progress.event(Event("t", "big", 2, "RUNNING", 1, [Change(2, 6000, 0, 1, "RUNNING", "w1")]))
        assert screen.getvalue() == f"{waits}\n"
        progress.event(Event("t", "big", 3, "SUCCEEDED", 1, [Change(3, 8000, 0, 1, "SUCCEEDED", "w1")]))
        progress.close()
    assert waits.startswith("big  QUEUED  2nd of 2")
    assert screen.getvalue() == f"{waits}\nbig  SUCCEEDED  on w1  3s\n"


def test_the_line_of_many_replicas_counts_their_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    progress = Progress("wide", replicas=40)

    def told(state: str, *changes: tuple[int, str]) -> str:
        rows = [Change(rev, 0, replica, 1, each) for rev, (replica, each) in enumerate(changes)]
        progress.event(Event("t", "wide", 1, state, 1, rows))
        return screen.getvalue().rpartition("\x1b[K")[2]

    assert told("QUEUED", (-1, "ACCEPTED")).startswith("wide  QUEUED  ")
    assert "starting 40" in told("PLACED", *((replica, "PLACED") for replica in range(40)))
    assert "wide  RUNNING  running 32  starting 8  " in told("RUNNING", *((n, "RUNNING") for n in range(32)))
    shown = told("RUNNING", *((n, "SUCCEEDED") for n in range(20)), (20, "FAILED"))
    assert "running 11  starting 8  done 21 (1 failed: 20)" in shown
    many = Event("t", "wide", 2, "RUNNING", 1, replicas=Replicas(40, {"QUEUED": 15, "RUNNING": 12, "SUCCEEDED": 13}))
    progress.event(many)
    assert "running 12  waiting 15  done 13" in screen.getvalue().rpartition("\x1b[K")[2]


def test_ranks_that_found_no_room_as_their_gang_started_are_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    progress = Progress("gang", replicas=4)
    rows = [Change(rev, 0, rev, 1, "PLACED", "w1") for rev in (0, 1)]
    rows += [Change(rev, 0, rev, 0, "CANCELLED", why="starts with 2 ranks, as many as have room") for rev in (2, 3)]
    progress.event(Event("t", "gang", 2, "PLACED", 1, rows))
    assert "starting 2" in screen.getvalue()
    progress.event(Event("t", "gang", 3, "SUCCEEDED", 1, [Change(rev, 0, rev, 1, "SUCCEEDED") for rev in (0, 1)]))
    progress.close()
    assert "done 2" in screen.getvalue()
    assert "cancelled" not in screen.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_of_some_replicas_tells_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    screen = Terminal()
    if is_terminal:
        monkeypatch.setattr("sys.stderr", screen)

    def told() -> str:
        return screen.getvalue() if is_terminal else capsys.readouterr().err

    rows = [Change(at + 2, 0, at, 1, "SUCCEEDED", f"w{at}") for at in range(100)]
    progress = Progress("wide", replicas=1, only=((7, 7),))
    progress.event(Event("t", "wide", 101, "RUNNING", 1, [Change(1, 0, -1, 0, "ACCEPTED"), *rows]))
    progress.waiting(explained_in({"reason": "busy", "state": "QUEUED"}))
    progress.close()
    shown = told()
    assert "wide  SUCCEEDED  on w7  replica 7" in shown
    assert not [other for other in (0, 6, 8, 70, 99) if f"w{other}" in shown]
    assert "QUEUED" not in shown, "it is over: others wait"
    if is_terminal:
        progress = Progress("wide", only=((7, 8),))
        progress.event(Event("t", "wide", 101, "RUNNING", 1, rows, replicas=Replicas(100, {"SUCCEEDED": 100})))
        assert "done 2" in told().rpartition("\x1b[K")[2]


def test_replicas_are_told_in_counts_and_ranges_with_when_the_last_will_end() -> None:
    states = {"RUNNING": 12, "SUCCEEDED": 837, "FAILED": 3, "CANCELLED": 2}
    ended = {"FAILED": "17, 40-41", "CANCELLED": "900-901"}
    assert replica_words(states, ended) == "running 12  done 842 (3 failed: 17, 40-41; 2 cancelled: 900-901)"
    assert replica_words({"FAILED": 9}, {"FAILED": ", ".join(map(str, range(0, 18, 2)))}).endswith("14, …)")
    now = [100.0]
    eta = Eta(lambda: now[0])
    assert eta.words({"RUNNING": 10, "QUEUED": 890}) == ""
    now[0] += 60
    assert eta.words({"RUNNING": 10, "QUEUED": 590, "SUCCEEDED": 300}) == "eta ~2m"


def test_columns_that_would_say_nothing_are_left_out_on_a_terminal_and_never_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    row = {"job": "a", "tenant": "t", "state": "RUNNING", "gpu": "1x-", "priority": 50, "attempt": 1, "age_ms": 5_000}
    assert jobs_table([row_of(row)]).splitlines()[0] == "\t".join(job_rows.COLUMNS)
    monkeypatch.setattr("sys.stdout", Terminal())
    assert not {"PRI", "TRY"} & set(jobs_table([row_of(row)]).splitlines()[0].split())
    for more in ({"priority": 60}, {"attempt": 2}):
        [name] = {"PRI", "TRY"} & set(jobs_table([row_of(row), row_of(row | more)]).splitlines()[0].split())
        assert name == ("PRI" if "priority" in more else "TRY")


def test_a_refused_request_of_the_queue_has_a_row_though_it_made_no_job() -> None:
    (row,) = wait.rows_of(Event("t", "typo", 0, "REJECTED", 9, why="unknown field $.gpus"), whole=True)
    told = {name: cell for name, cell in zip(wait.COLUMNS, row, strict=True) if cell != "-"}
    assert told == {"JOB": "typo", "STATE": "REJECTED", "WHY": "unknown field $.gpus"}


def test_show_has_what_its_request_says_and_how_an_attempt_before_ended() -> None:
    run = {"timeout_s": 7200, "restart": "always", "files": "a1", "checkpoint": "ckpt"}
    change = {"rev": 3, "time_ms": 9, "replica": 0, "attempt": 1, "state": "QUEUED", "worker": "w", "code": 3}
    data: dict[str, Any] = {
        "job": "a",
        "tenant": "t",
        "state": "QUEUED",
        "request": {"retries": 2, "run": run},
        "changes": [change],
    }
    told = words_of(data)
    rows = [tuple(line.split("\t")) for line in told.splitlines()]
    for row in (("time limit", "2h"), ("retries", "2"), ("restart", "always"), ("files", "a1"), ("checkpoint", "ckpt")):
        assert row in rows
    assert "it ended by itself, with code 3" in told
    assert "ended by itself" not in words_of(data | {"changes": [change | {"why": "end"}]})


def test_a_claimed_job_with_a_setup_says_that_its_setup_comes_first() -> None:
    data: dict[str, Any] = {
        "job": "a",
        "tenant": "t",
        "state": "CLAIMED",
        "request": {"run": {"setup": "pip install torch"}},
    }
    told = "setup\tcomes first on its worker: pip install torch (its output: moorage logs a)"
    assert told in words_of(data)
    some = {
        "state": "RUNNING",
        "replica_states": [{"replica": 0, "state": "RUNNING"}, {"replica": 1, "state": "CLAIMED"}],
    }
    assert told in words_of(data | some)
    assert "setup\tpip install torch\n" in words_of(data | {"state": "RUNNING"}) + "\n"
    assert told not in words_of(data | {"request": {"run": {}}})


def test_of_many_replicas_the_changes_are_shown_of_those_that_did_not_go_well() -> None:
    def changes(replicas: int) -> list[dict[str, Any]]:
        found = [{"rev": 1, "time_ms": 0, "replica": -1, "attempt": 0, "state": "ACCEPTED"}]
        for number in range(replicas):
            state = "FAILED" if number == 7 else "SUCCEEDED"
            attempt = 2 if number == 9 else 1
            found.append({"rev": 2 + number, "time_ms": 9, "replica": number, "attempt": attempt, "state": state})
        return found

    data = {"job": "lr", "tenant": "t", "state": "FAILED", "request": {"run": {"items": ["a"] * 17}}}
    few = words_of({**data, "changes": changes(16)})
    assert (few.count("SUCCEEDED"), "left out" in few) == (15, False)
    many = words_of({**data, "changes": changes(17)})
    assert (many.count("SUCCEEDED"), many.count("FAILED")) == (1, 2)
    assert many.endswith("15 replicas without a failure or a second attempt left out: --json has all changes")
    assert "17, in its request" in many
    newest = words_of({**data, "changes": changes(17)[3:]})
    assert newest.endswith("older changes are left out; moorage events lr has what is kept of them")
    assert "1970-01-01T00:00:00" in newest, "no time since its acceptance where that is not told"
    ends = {"replicas": {"of": 5000, "states": {"FAILED": 2, "SUCCEEDED": 4998}, "ended": {"FAILED": "7, 4000"}}}
    assert "older changes are left out" in words_of({**data, **ends, "changes": changes(8)})
    some = {"run": {"items": ["a"] * 17}, "indices": "0-2,7"}
    assert "4 of 17, in its request" in words_of({**data, "request": some})
    file = {"run": {"items": {"file": "lr.csv", "format": "csv"}}}
    assert "lr.csv, one of its files" in words_of({**data, "request": file})


@pytest.mark.parametrize(("of", "shown"), [(0, "0.00"), (1.54 / 3600, "0.00043"), (0.004, "0.004"), (12.3456, "12.35")])
def test_hours_of_a_short_wait_are_not_zero(of: float, shown: str) -> None:
    assert hours(of) == shown


def test_a_worker_shows_for_which_modes_its_devices_are_kept_and_their_labels() -> None:
    devices = [
        DeviceRow(0, "nvidia", "H100", "GPU-0", slot=0, modes=["mps", "time-slice"], labels={"wall": "a", "tier": "x"}),
        DeviceRow(1, "nvidia", "H100", "GPU-1", slot=1),
    ]
    assert kept(devices) == ["GPU 0: only for jobs with mps or time-slice", "GPU 0: the labels tier=x wall=a"]
