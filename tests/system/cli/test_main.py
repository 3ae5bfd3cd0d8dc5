"""The command's first words: help, version, and what is wrong with a command line; no server needed."""

from __future__ import annotations

import gc
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moorage.cli.examples import EXAMPLES
from moorage.cli.framework.arguments import read
from moorage.cli.framework.exit_codes import EXIT_OF_CODE
from moorage.cli.habits import OURS
from moorage.cli.main import main
from moorage.cli.topics import TOPICS
from moorage.cli.verbs import FIRST_HELP_MAX, LOOKUP, VERBS, find
from tests.system.cli.node import Ran, moorage

NOWHERE = ("--nats", "nats://127.0.0.1:1", "--timeout", "300ms")
ALL = [verb.name for verbs in VERBS.values() for verb in verbs]
#: verbs that read the ledger themselves, or serve
OF_LEDGER = {"replay", "admin trace", "admin backup", "admin restore", "scheduler", "worker", "serve"}
#: verbs that talk to no scheduler
ALONE = {
    "demo",
    "help",
    "completion",
    "admin nats-config",
    "admin renew",
    "add-path",
    "check worker",
    "lease",
    "page logout",
    "admin keys",
    "admin token",
    "admin joiner",
    "simulate",
    "policy test",
    "up",
    "errors",
    "schema",
    *OF_LEDGER,
}
#: of those, options that mean something of their own, or that are of use there
OWN_OPTIONS = {
    ("demo", "--json"), ("admin nats-config", "--json"), ("admin nats-config", "--tenant"),
    ("serve", "--tenant"),
    *((verb, "--json") for verb in ("add-path", "check worker", "lease", "simulate", "up", "errors", "schema")),
    ("policy test", "--json"),
    ("admin token", "--json"), ("admin token", "--nats"),
    *(("admin joiner", option) for option in ("--nats", "--json", "--tenant")),
    ("page logout", "--json"), ("admin keys", "--json"), ("admin renew", "--json"),
    *((verb, option) for verb in OF_LEDGER for option in ("--nats", "--json")),
}  # fmt: skip


Command = Callable[..., Ran]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """The command in this process: what is tested here needs no server."""
    for name in ("NATS_CONTEXT", "NATS_URL", "MOORAGE_TENANT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOORAGE_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))

    def run(*argv: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    yield run
    gc.unfreeze()
    gc.enable()


async def test_version_is_one_line() -> None:
    ran = await moorage("--version")
    assert (ran.code, ran.err, len(ran.out.splitlines())) == (0, "", 1)


def test_the_first_help_is_short_and_the_whole_one_has_everything(command: Command) -> None:
    first, whole = command(), command("help")
    assert (first.code, whole.code) == (0, 0)
    assert command("--help").out == first.out
    listed = [name for name in ALL if f"\n  {name} " in first.out]
    assert len(listed) <= FIRST_HELP_MAX
    left_out = {verb.name for verb in VERBS[LOOKUP]}
    folded = {name for name in ALL if " " in name} - left_out
    assert set(ALL) - set(listed) - folded == left_out
    assert all(f"\n  {name.partition(' ')[0]} " in first.out for name in folded)
    assert len(first.out.splitlines()) <= 38
    for name in [*ALL, *TOPICS]:
        assert f"\n  {name} " in whole.out


def test_every_topic_has_a_page(command: Command) -> None:
    for topic in TOPICS:
        ran = command("help", topic)
        assert (ran.code, ran.err) == (0, "")
        assert len(ran.out.splitlines()) > 3
    codes = dict(line.split("\t") for line in command("help", "exit-codes").out.splitlines())
    assert set(codes) >= {str(code) for code in (0, *EXIT_OF_CODE.values())}


def test_every_verb_has_help_with_examples(command: Command) -> None:
    for verb in ALL:
        ran = command(verb, "--help")
        assert (ran.code, ran.err) == (0, "")
        assert command("help", verb).out == ran.out
        assert max(map(len, ran.out.splitlines())) <= 80
        for option in ("--nats", "--tenant", "--json", "--timeout"):
            assert (f"\n  {option}" in ran.out) == (verb not in ALONE or (verb, option) in OWN_OPTIONS)
        examples = ran.out.partition("Examples:\n")[2].partition("\n\n")[0]
        assert [line.strip() for line in examples.splitlines()] == list(EXAMPLES[verb])
        assert all(f"moorage {verb}" in line for line in EXAMPLES[verb])


def test_every_example_can_be_read(command: Command) -> None:
    for verb, lines in EXAMPLES.items():
        for line in lines:
            for command_line in re.findall(r"\bmoorage ((?:'[^']*'|[^|&>)'])*)", line):
                found, rest = find(shlex.split(command_line))
                assert found is not None, line
                read(found.name, found.load(), rest)
            assert f"moorage {verb}" in line


def test_words_of_other_tools_lead_to_verbs_that_there_are() -> None:
    assert set(OURS.values()) <= set(ALL)
    assert not set(OURS) & {name.partition(" ")[0] for name in ALL}


@pytest.mark.parametrize(
    ("argv", "code", "name", "fix"),
    [
        (["lss"], 2, "unknown-verb", "moorage ls --help"),
        (["squeue", "--me"], 2, "unknown-verb", "moorage ls --help"),
        (["admin", "drain", "n03"], 2, "unknown-verb", "moorage drain --help"),
        (["why", "last"], 2, "unknown-verb", "moorage explain --help"),
        (["help", "nodes"], 3, "not-found", "moorage help fleet"),
        (["schedule", "rm", "nightly"], 2, "unknown-verb", "moorage schedule remove --help"),
        (["schedule", "list"], 2, "unknown-verb", "moorage schedule ls --help"),
        (["kill", "train-42"], 2, "unknown-verb", "fix: moorage cancel train-42"),
        (["schedule", "rm", "nightly"], 2, "unknown-verb", "fix: moorage schedule remove nightly"),
        (["schedule", "run", "nightly"], 2, "unknown-verb", "fix: moorage schedule run-now nightly"),
        (["hold", "train-42"], 2, "unknown-verb", "fix: moorage admin hold train-42"),
        (["admin", "quota", "--tenant", "a", "--gpus", "2"], 2, "unknown-verb", "admin limit --tenant a --gpus 2"),
        (["schedule", "nightly"], 2, "unknown-verb", "fix: moorage schedule --help"),
        (["squeue"], 2, "unknown-verb", "fix: moorage ls"),
        (["pause", "train-42"], 2, "unknown-verb", "fix: moorage admin freeze train-42"),
        (["salloc", "--gres=gpu:2"], 2, "unknown-verb", "moorage run -it --gpu -- bash"),
        (["qsub", "train.sh"], 2, "unknown-verb", "moorage submit --with job.sh -- bash job.sh"),
        (["schedule", "add", "n", "--every", "3s", "--", "x"], 2, "invalid-argument", "--cron '@every 3s'"),
        (["ls", "--limt", "3"], 2, "invalid-argument", "moorage ls --limit 3"),
        (["ls", "--limt=3"], 2, "invalid-argument", "moorage ls --limit=3"),
        (["help", "exit-code"], 3, "not-found", "moorage help exit-codes"),
        (["run", "nvidia-smi", "-L"], 2, "invalid-argument", "moorage run -- nvidia-smi -L"),
        (["run", "--gpu", "2", "train", "--priority", "3"], 2, "invalid-argument", "--gpu 2 -- train --priority 3"),
        (["run", "--gpu", "2", "H100", "--", "x"], 2, "invalid-argument", "the whole command stands after --"),
        (["show", "a", "--wach"], 2, "invalid-argument", "moorage show a --watch"),
        (["--tenant", "acme", "ls", "--watch"], 2, "unknown-verb", "moorage ls --watch --tenant acme"),
        (["--context", "prod", "ls", "--watch"], 2, "unknown-verb", "moorage ls --watch --nats prod"),
        (["version"], 2, "unknown-verb", "moorage --version"),
        (["--wat"], 2, "unknown-verb", "moorage --help"),
        (["drain"], 2, "invalid-argument", "moorage drain --help"),
        (["errors", "no-mach"], 3, "not-found", "moorage errors no-match"),
        (["schema", "evnt"], 3, "not-found", "moorage schema event"),
        (["run"], 2, "invalid-argument", "--"),
        (["run", "--gpu", "2xH100@mos", "--", "x"], 2, "invalid-argument", "1xH100"),
        (["run", "--job", "a.b", "--", "x"], 2, "invalid-argument", "letters, digits, - and _"),
        (["submit", "-f", "/no/such/file"], 2, "invalid-argument", "stdin"),
        (["submit", "-f", "/dev/null"], 2, "invalid-argument", "run"),
        (["submit", "-f", "-", "--", "x"], 2, "invalid-argument", "-f"),
        (["explain", "a.b", *NOWHERE], 5, "cannot-connect", "moorage up"),
        (["ls", "--tenant", "Nobody!", *NOWHERE], 2, "invalid-argument", "MOORAGE_TENANT"),
        (["ls", *NOWHERE], 5, "cannot-connect", "moorage up"),
        (["run", *NOWHERE, "--", "true"], 5, "cannot-connect", "moorage up"),
        (["ls", "--nats", "http://x"], 2, "bad-context", "nats://"),
        (["ls", "--nats", "no-such-context"], 2, "bad-context", "context"),
        (["up", "--simulate", "8"], 2, "invalid-argument", "4x8xH100"),
        (["up", "--port", "70000"], 2, "bad-settings", "--port 4222"),
        (["up", "--data", "/proc/nothing"], 1, "failed-precondition", "--data"),
        (["worker", "--id", "no.such.name", *NOWHERE[:2]], 2, "bad-settings", "give --id another value"),
        (["worker", "--label", "zone", *NOWHERE[:2]], 2, "bad-settings", "--label zone=a"),
    ],
)
def test_a_bad_command_line_is_told_in_one_clear_line(
    argv: list[str], code: int, name: str, fix: str, command: Command
) -> None:
    ran = command(*argv)
    assert ran.code == code, ran.err
    first, *rest = ran.err.splitlines()
    assert first.startswith(f"error[{name}]: ")
    assert any(line.startswith("fix: ") and fix in line for line in rest), ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


@pytest.mark.parametrize("word", ["ray", "deploy", "remote", "scale"])
def test_a_word_that_resembles_no_verb_leads_to_the_help_and_to_no_other_verb(command: Command, word: str) -> None:
    assert "fix: moorage --help" in command(word).err


@pytest.mark.parametrize("verb", ["submit", "show", "wait", "drain", "plan"])
def test_bytes_that_are_no_text_are_refused_before_anything_is_sent(command: Command, verb: str) -> None:
    ran = command(verb, "caf\udce9", *NOWHERE, "--json")
    assert ran.code == 2
    assert json.loads(ran.out)["code"] == "invalid-argument"
    assert "not valid UTF-8" in ran.err


def test_a_fix_that_quotes_the_line_rules_no_terminal(command: Command) -> None:
    ran = command("run", "\x1b[31mred", "--json")
    assert "\x1b" not in ran.err
    assert "\\x1b[31mred" in ran.err


def test_an_error_is_a_frame_with_json(command: Command) -> None:
    for argv, code in ((("lss", "--json"), "unknown-verb"), (("ls", "--limt", "3", "--json"), "invalid-argument")):
        ran = command(*argv)
        assert (ran.code, ran.frame["kind"], ran.frame["code"]) == (2, "error", code)
        assert ran.frame["next"].startswith("moorage ls")
    ran = command("ls", "--json", *NOWHERE)
    assert ran.code == 5
    assert (ran.frame["kind"], ran.frame["code"]) == ("error", "cannot-connect")


def test_a_secret_of_the_url_is_never_shown(command: Command) -> None:
    ran = command("ls", "--nats", "nats://me:hunter2@127.0.0.1:1", "--timeout", "300ms")
    assert ran.code == 5
    assert "hunter2" not in ran.out + ran.err


def test_a_code_is_explained_without_a_server(command: Command) -> None:
    for word in ("no-match", "no-scheduler", "cannot-connect", "gang-size"):
        ran = command("explain", word, *NOWHERE)
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.startswith(f"{word}: ")
