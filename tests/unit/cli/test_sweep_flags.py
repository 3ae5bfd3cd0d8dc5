"""`--each-line` and `--each` before anything is sent: what they become, and what of a file is refused."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.cli.jobs.instead import instead
from moorage.cli.jobs.job_flags import JobFlags, choices_of, request_of
from moorage.cli.jobs.sweep_flags import sweep_of
from moorage.cli.main import run
from moorage.client import Rejected
from moorage.schemas.items import ItemsFile
from moorage.schemas.job import Request

FILES = {
    "lines.txt": "a\nb\n\nc\n",
    "sweep.csv": "lr,seed\n0.1,1\n0.2,2\n",
    "sweep.jsonl": '{"lr": 0.1}\n{"lr": 0.2}\n',
    "bad.csv": "lr,seed\n0.1,1\n0.2\n",
    "many.txt": "0123456789\n" * 2_000,
    "empty.txt": "\n",
}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)


def request(command: str, **said: Any) -> Request:
    flags, words = JobFlags(**said), command.split()
    return request_of(flags, words, sweep_of(flags, words))


@pytest.mark.parametrize(
    ("said", "items", "numbers"),
    [
        ({"each_line": "lines.txt"}, ["a", "b", "c"], ((0, 2),)),
        ({"each": "sweep.csv"}, [{"lr": "0.1", "seed": "1"}, {"lr": "0.2", "seed": "2"}], ((0, 1),)),
        ({"each": "sweep.jsonl"}, [{"lr": 0.1}, {"lr": 0.2}], ((0, 1),)),
        ({"each_line": "lines.txt", "array": "0,2%1"}, ["a", "b", "c"], ((0, 0), (2, 2))),
        ({"each_line": "lines.txt", "replicas": "3"}, ["a", "b", "c"], ((0, 2),)),
    ],
)
def test_each_item_has_a_replica(said: dict[str, Any], items: list[Any], numbers: Any) -> None:
    made = request("echo {item}", **said)
    assert (made.workload.items, made.numbers) == (items, numbers)
    assert made.max_running == (1 if "array" in said else None)


def test_items_of_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    assert request("echo {item}", each_line="-").workload.items == ["a", "b"]


def test_many_items_are_a_file_that_is_sent() -> None:
    flags = JobFlags(each_line="many.txt")
    sweep = sweep_of(flags, ["true"])
    assert sweep is not None
    assert sweep[:4] == (2000, None, ItemsFile("many.txt"), "many.txt")
    made = request_of(flags, ["true"], sweep)
    assert (made.replicas, made.workload.items) == (2000, None)
    inline = sweep_of(JobFlags(each_line="many.txt", driver="kubernetes"), ["true"])
    assert inline is not None
    assert inline.values == ["0123456789"] * 2000, "pods bring no files"


def test_each_choice_has_the_items() -> None:
    flags = JobFlags(each_line="lines.txt", gpu="1xA100", or_gpu=["1xL40S"])
    sweep = sweep_of(flags, ["true"])
    first = request_of(flags, ["true"], sweep)
    assert [choice.workload.items for choice in choices_of(flags, ["true"], first, sweep)] == 2 * [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("said", "command", "says"),
    [
        ({"each": "bad.csv"}, "true", "bad.csv: line 3 must have 2 values, one for each column, found 1"),
        ({"each": "sweep.csv"}, "echo {lrr}", "argv names {lrr}, and line 2 of sweep.csv has the columns lr, seed"),
        ({"each_line": "lines.txt"}, "echo {lr}", "argv names {lr}, and line 1 of lines.txt has no columns"),
        ({"each_line": "empty.txt"}, "true", "empty.txt has no items"),
        ({"each_line": "none.txt"}, "true", "none.txt cannot be read: No such file or directory"),
        ({"each_line": "."}, "true", ". cannot be read: Is a directory"),
        ({"each": "lines.txt"}, "true", "--each: what lines.txt holds cannot be told by its name"),
        ({"each": "-"}, "true", "--each: what - holds cannot be told by its name"),
        ({"each": "sweep.csv", "each_line": "lines.txt"}, "true", "--each-line and --each cannot be used together"),
        ({"each_line": "lines.txt", "replicas": "5"}, "true", "5 replicas are asked for, and there are 3 items"),
        ({"each_line": "lines.txt", "array": "1-3"}, "true", "replica 3 has no item, as there are 3"),
        (
            {"each": "sweep.csv", "gpu": "2x4xH100"},
            "true",
            "--gpu: 2x4xH100 asks for 2 replicas, and the job has one f",
        ),
        (
            {"array": "0-4", "gpu": "2x4xH100"},
            "true",
            "--gpu: 2x4xH100 asks for 2 replicas, and the job has one for each index",
        ),
        (
            {"each_line": "many.txt", "gpu": "3x1xA10"},
            "true",
            "--gpu: 3x1xA10 asks for 3 replicas, and the job has 2000",
        ),
        ({"each_line": "many.txt", "array": "2000"}, "true", "replica 2000 has no item, as there are 2000"),
    ],
)
def test_what_no_replica_could_have_is_refused(said: dict[str, Any], command: str, says: str) -> None:
    with pytest.raises(Rejected) as refused:
        request(command, **said)
    assert refused.value.why.startswith(says)
    assert refused.value.fixes


def test_items_are_for_new_jobs() -> None:
    with pytest.raises(Rejected, match="are for new jobs"):
        instead("train", JobFlags(each_line="lines.txt"), [], None)


def test_with_hosts_each_item_is_a_gang_and_a_job_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--job", "t", "--hosts", "2", "--gpu", "4xH100", "--dry-run"]
    assert run([*words, "--each", "sweep.csv", "--label", "team=vision", "--", "train", "{lr}"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["job"], second["job"]) == ("t-0", "t-1")
    assert second["run"] == {"argv": ["train", "{lr}"], "items": [{"lr": "0.2", "seed": "2"}] * 2}
    assert (second["replicas"], second["gpu"]["distinct_hosts"]) == (2, True)
    assert second["labels"] == {"sweep": "t", "team": "vision"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--each", "sweep.csv", "--max-running", "1"], "--max-running is for the replicas of one job"),
        (["--each", "sweep.csv", "--array", "0-1"], "--array is for the replicas of one job"),
        (["--each-line", "many.txt"], "many.txt has too many trials"),
        (["--each", "bad.csv"], "line 3"),
        (["--array", "0-1"], "moorage submit --hosts 2 --each FILE"),
        (["--each", "sweep.csv", "--job", 63 * "a"], "allowed 1..62 characters"),
    ],
)
def test_trials_that_cannot_be_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "--hosts", "2", "--gpu", "1xH100", *words, "--", "train", "{item}"]) == 2
    assert says in capsys.readouterr().err


def test_a_place_for_an_item_beside_the_command_is_said_to_stay_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    asked = request("train {lr}", each="sweep.csv", env=["LR={lr}", "J={}", 'K={"a": 1}', "PLAIN=x"], cwd="/srv/{item}")
    assert asked.workload.env["LR"] == "{lr}"
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" stays")[0] for line in said] == [
        "warning[items]: --env LR={lr}",
        "warning[items]: --cwd /srv/{item}",
    ]
    request("train {lr}", each="sweep.csv", env=["PLAIN=x"])
    assert capsys.readouterr().err == ""
