"""Files of jobs for people, in YAML and TOML, beside requests in JSON, and what `--dry-run` shows of them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from moorage.cli import main
from moorage.cli.framework.options import Work
from moorage.cli.jobs import submit
from moorage.cli.jobs.job_file import Said, read_job_file
from moorage.cli.jobs.job_flags import JobFlags
from moorage.client import AsyncClient, Rejected
from moorage.client.packing import pack
from moorage.testing import SimFleet
from tests.scenes import in_virtual_time

SWEEP = """\
# eight at a time
each: sweep.csv
max-running: 8
gpu: 1xH100:80G
time_limit: 1h
with: [train.py]
keep:
  - out/**
env:
  SEED: 007
  DEBUG: no
label: {team: vision}
gang: false
preemptible: true
command: python3 train.py --lr {lr} --name "a b"
"""

FLAGS = JobFlags(
    each="sweep.csv", max_running=8, gpu="1xH100:80G", time_limit="1h", with_=["train.py"], keep=["out/**"],
    env=["SEED=007", "DEBUG=no"], label=["team=vision"], preemptible=True,
)  # fmt: skip
WORDS = ("python3", "train.py", "--lr", "{lr}", "--name", "a b")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.csv").write_text("lr\n0.1\n0.2\n")
    Path("train.py").write_text("print()")


def said(name: str, text: str) -> Any:
    Path(name).write_text(text)
    return read_job_file(name)


def test_yaml_has_the_options_by_name_as_they_are_written() -> None:
    assert said("sweep.yaml", SWEEP) == Said(FLAGS, WORDS)
    assert said("a.yml", "command: [echo, 1, yes]") == Said(JobFlags(), ("echo", "1", "yes"))
    assert said("b.yml", "gpu:\ncommand: nvidia-smi").flags == JobFlags(gpu="1")
    assert said("d.yml", "gang: yes\nspread: off\njob: no\ncommand: [echo, '|']") == Said(
        JobFlags(gang=True, job="no"), ("echo", "|")
    )
    config = "driver: docker\ndriver-config: {docker: {shm_mib: 64}}\ncommand: echo"
    assert said("c.yml", config).flags.driver_config == '{"docker":{"shm_mib":64}}'


def test_toml_has_the_same() -> None:
    text = """
    command = ["echo", "{item}", 7]
    each-line = "lines.txt"
    replicas = 3
    preemptible = true
    gang = false
    cpu = 0.5
    label = {team = "vision"}
    """
    flags = JobFlags(each_line="lines.txt", replicas="3", preemptible=True, cpu=0.5, label=["team=vision"])
    assert said("job.toml", text) == Said(flags, ("echo", "{item}", "7"))


def test_what_the_command_line_says_holds_over_the_file() -> None:
    file = said("sweep.yaml", SWEEP)
    over = file.under(JobFlags(gpu="2xA100", env=["SEED=1"], gang=True), ("echo",))
    assert (over.flags.gpu, over.flags.gang, over.flags.max_running) == ("2xA100", True, 8)
    assert (over.flags.env, over.command) == (["SEED=007", "DEBUG=no", "SEED=1"], ("echo",))
    assert file.under(JobFlags(), ()) == file


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "run: {argv: [a, 7]}\ngpu: {count: 2}"),
        ("a.toml", 'gpu.count = 2\nrun.argv = ["a", 7]'),
        ("a.json", '{"run": {"argv": ["a", 7]}, "gpu": {"count": 2}}'),
        ("a.JSON", '{"run": {"argv": ["a", 7]}, "gpu": {"count": 2}}'),
    ],
)
def test_a_file_may_be_a_request_as_on_the_wire(name: str, text: str) -> None:
    assert said(name, text) == {"run": {"argv": ["a", 7]}, "gpu": {"count": 2}}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "gpu: 1\n", "a.yaml has no command"),
        ("a.yaml", "command: echo 'x\n", "a.yaml: command cannot be divided into words: No closing quotation"),
        ("a.yaml", "command: echo\ngpus: 2\n", "a.yaml, line 2: no option --gpus"),
        ("a.yaml", "command: echo\nretries: many\n", "a.yaml, line 2: --retries: not a whole number: 'many'"),
        ("a.yaml", "command: echo\ngang: maybe\n", "a.yaml, line 2: --gang takes no value, found 'maybe'"),
        ("a.yaml", "command: [echo\n", "a.yaml is not YAML: while parsing a flow sequence"),
        ("a.yaml", "5", "a.yaml must hold requests alone"),
        ("a.yaml", "", "a.yaml has no command"),
        ("a.yaml", "command: [echo, {item}]", "a.yaml: each value of command must be one text"),
        ("a.yaml", "command: echo\nenv: {A: [1, 2]}", "a.yaml: each value of env must be one text"),
        ("a.yaml", "command: echo\nretry: [{on: [oom], times: 2}]", "a.yaml: each value of retry must be one text"),
        ("a.yaml", "command: echo\nenv: {<<: {A: 1}}", "a.yaml: each value of env must be one text, and << is none"),
        ("a.yaml", "command: seq 3 | tail -1", "a.yaml: no shell reads the command, and | is a shell's"),
        ("a.yaml", "env: {A: 1}\ncommand: echo\nenv: {B: 2}", "a.yaml: line 3 has env for the second time"),
        ("a.json", '{"run": {"argv": ["a"], "env": {"A": "1", "A": "2"}}}', "a.json has A twice in one object"),
        ("a.json", '{"run": {"argv": ["a"]}}\n{"gpu": 1, "run": {}, "gpu": 2}', "line 2 of a.json has gpu twice"),
        ("a.yaml", "max-running: 2\nmax_running: 3\ncommand: echo", "a.yaml: max-running and max_running are one"),
        ("a.toml", "max-running = 2\nmax_running = 3\ncommand = 'echo'", "a.toml: max-running and max_running are one"),
        ("a.yaml", "env: {A: 1, A: 2}\ncommand: echo", "a.yaml: line 1 has A for the second time"),
        ("a.yaml", "command: |\n  echo a\n  echo b\n", "a.yaml: command has 2 lines, and no shell reads them"),
        ("a.yaml", "command: echo\ntime-limit: 60\n", "a.yaml, line 2: --time-limit: a duration without a unit: '60'"),
        ("a.toml", "command = ", "a.toml is not TOML: "),
        ("a.toml", "gpu = '1'", "a.toml has no command"),
        ("none.yaml", None, "none.yaml cannot be read: No such file"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_name(name: str, text: str | None, says: str) -> None:
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(Rejected) as refused:
        read_job_file(name)
    assert refused.value.why.startswith(says)
    assert refused.value.fixes


@pytest.mark.parametrize(("line", "meant"), [("gpus: 2", "gpu"), ("name: train", "job"), ("depends-on: a", "after")])
def test_a_misspelt_option_of_a_file_is_told_with_the_one_that_is_meant(line: str, meant: str) -> None:
    Path("a.yaml").write_text(f"command: echo\n{line}\n")
    with pytest.raises(Rejected) as refused:
        read_job_file("a.yaml")
    assert refused.value.fixes == (f"write {meant} in place of {line.partition(':')[0]}",)


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("FOO=1 python3 train.py", "FOO=1"),
        ("python3 train.py --out ~/out", "~/out"),
        ("python3 merge.py part-*.csv", "part-*.csv"),
        ("python3 train.py $MOORAGE_ITEM", "$MOORAGE_ITEM"),
        ('python3 train.py "it\'s ${ITEM}"', "${ITEM"),
        ("echo `date`", "`"),
        ("cd src && python3 train.py", "&&"),
    ],
)
def test_what_only_a_shell_would_read_is_refused(command: str, word: str) -> None:
    Path("a.yaml").write_text(yaml.safe_dump({"command": command}))
    with pytest.raises(Rejected, match=f"and {re.escape(word)} is a shell's"):
        read_job_file("a.yaml")


@pytest.mark.parametrize(
    "command",
    [
        "a 'part-*.csv' '$X' '~'",
        'a "part-*.csv" "it\'s ~/x"',
        r"a \$X \* \~ X=1",
        "a https://b/?c=d#~e --f=~/g",
        "X=1",
        'a "\\$X"',
    ],
)
def test_what_is_quoted_is_a_plain_word(command: str) -> None:
    assert list(said("a.yaml", yaml.safe_dump({"command": command})).command) == shlex.split(command)


def test_a_variable_that_is_no_text_is_not_shown() -> None:
    Path("a.yaml").write_text("command: echo\nenv: {TOKEN: {value: s3cret}}")
    with pytest.raises(Rejected) as refused:
        read_job_file("a.yaml")
    assert "s3cret" not in repr(refused.value.problem)
    assert refused.value.problem.found == "dict"


@pytest.mark.parametrize(
    "text",
    [
        "command: |\n  echo a \\\n    'b\n  c'\n",
        "command: >\n  echo a\n  'b\n\n  c'\n",
        "command: |\n\n  echo a 'b\n  c'\n\n",
    ],
)
def test_a_command_of_several_lines_is_one_where_it_goes_on(text: str) -> None:
    assert said("a.yaml", text).command == ("echo", "a", "b\nc")


def test_paths_of_a_file_begin_at_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("exp").mkdir()
    text = "each: sweep.csv\nwith: [train.py, lib]\nenv-file: all.env\nkeep: [out]\ncommand: python3 train.py {lr}\n"
    Path("exp/sweep.yaml").write_text(text)
    with pytest.raises(Rejected) as refused:
        read_job_file("exp/sweep.yaml")
    assert refused.value.why == (
        "exp/sweep.yaml: paths begin at the folder of the file, and exp/sweep.csv does not exist"
    )
    assert refused.value.problem.found == f"{Path.cwd()}/sweep.csv, in the shell's folder"
    assert refused.value.problem.allowed == f"a path from {Path.cwd()}/exp on"
    assert refused.value.fixes[0].startswith("write ../sweep.csv in the file")
    Path("exp/sweep.csv").write_text("lr\n7\n")
    Path("exp/train.py").write_text("print('beside')")
    Path("exp/lib").mkdir()
    Path("exp/lib/a.py").touch()
    Path("exp/all.env").write_text("SEED=7\n")
    file = read_job_file("exp/sweep.yaml")
    assert isinstance(file, Said)
    assert (file.flags.each, file.flags.with_) == ("exp/sweep.csv", ["exp/train.py", "exp/lib"])
    assert file.flags.keep == ["out"]
    [request] = dry(capsys, "-f", "exp/sweep.yaml")
    assert (request["run"]["items"], request["run"]["env"]) == ([{"lr": "7"}], {"SEED": "7"})
    Path("exp/stdin.yaml").write_text("each-line: '-'\ncommand: echo")
    stdin = read_job_file("exp/stdin.yaml")
    assert isinstance(stdin, Said)
    assert stdin.flags.each_line == "-"


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main.run(["submit", "--dry-run", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_dry_run_prints_the_request_and_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep.yaml").write_text(SWEEP)
    [request] = dry(capsys, "-f", "sweep.yaml", "--job", "lr", "--keep", "*.log", "--nats", "nats://127.0.0.1:1")
    packed = pack(["train.py"])
    packed.file.close()
    assert request == {
        "job": "lr",
        "replicas": 2,
        "max_running": 8,
        "gpu": {"model": "H100", "min_memory_mib": 74768},
        "run": {
            "argv": list(WORDS),
            "env": {"SEED": "007", "DEBUG": "no"},
            "files": packed.address,
            "items": [{"lr": "0.1"}, {"lr": "0.2"}],
            "keep": ["out/**", "*.log"],
            "timeout_s": 3600.0,
        },
        "on_no_match": "reject",
        "labels": {"team": "vision"},
        "preemptible": True,
    }


def test_a_dry_run_of_many_items_has_the_file_that_would_be_sent(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lines.txt").write_text("0123456789\n" * 2_000)
    [request] = dry(capsys, "--each-line", "lines.txt", "--", "echo", "{item}")
    packed = pack(["lines.txt"])
    packed.file.close()
    assert request["replicas"] == 2000
    assert request["run"]["items"] == {"file": "lines.txt", "format": "lines"}
    assert request["run"]["files"] == packed.address


def test_requests_of_a_file_take_files_and_what_to_keep(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.json").write_text(
        '[{"run": {"argv": ["a"]}, "on_no_match": "wait"}, {"run": {"argv": ["b"], "items": {"file": "sweep.csv"}}}]'
    )
    told = dry(capsys, "-f", "a.json", "--with", ".", "--keep", "out/**")
    assert len({request["run"]["files"] for request in told}) == 1
    assert [request["run"]["keep"] for request in told] == [["out/**"], ["out/**"]]
    assert [request["on_no_match"] for request in told] == ["wait", "reject"], "said always: it is no default of a file"
    assert dry(capsys, "--on-no-match", "wait", "--", "true")[0]["on_no_match"] == "wait"
    assert main.run(["submit", "-f", "a.json", "--gpu", "1", "--dry-run"]) == 2
    assert "a file of requests holds all of them, but for --with and --keep" in capsys.readouterr().err
    assert main.run(["submit", "--instead-of", "a", "--gpu", "1", "--dry-run"]) == 2
    assert "leave out -f and --dry-run" in capsys.readouterr().err
    for words in (["-f", "a.json"], ["--", "true"]):
        assert main.run(["submit", "--dry-run", "--with", "job:sweep", *words]) == 2
        assert "which files job sweep keeps, the scheduler knows" in capsys.readouterr().err


def test_requests_of_a_file_bring_what_a_job_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """`job:sweep` was taken for a path, and looked for on this machine."""
    works: list[Work] = []
    monkeypatch.setattr(submit, "with_client", lambda _, work, sends: works.append(work))
    monkeypatch.setattr(submit, "detachable", lambda work, _: work)  # which wants signals
    Path("a.json").write_text('[{"job": "a", "run": {"argv": ["a"]}}]')
    assert main.run(["submit", "-f", "a.json", "--with", "job:sweep"]) == 0

    @in_virtual_time
    async def scene() -> None:
        async with AsyncClient(transport=SimFleet("8xH100")) as client:
            await client.submit(["x"], job="sweep", indices="0-1", keep=["out/**"])
            assert not await works[0](client)
            shown = await client._wire.read("show", {"job": "a"})
        (brought,) = shown["request"]["run"]["files_of"]
        assert (brought["job"], brought["replicas"]) == ("sweep", "0-1")

    scene()
