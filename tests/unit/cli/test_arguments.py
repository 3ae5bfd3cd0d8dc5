"""A line becomes what the verb's signature says, and is refused otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.cli import main, verbs
from moorage.cli.framework.arguments import CannotRead, arguments_of, read
from moorage.cli.framework.exit_codes import EXIT_FAILED, EXIT_USAGE
from moorage.cli.framework.options import Options, RowOptions
from moorage.cli.jobs import ls, submit
from moorage.cli.jobs.job_flags import JobFlags
from moorage.cli.jobs.selectors import Chosen
from moorage.cli.local.processes import SchedulerFlags
from moorage.cli.verbs import all_verbs, below, find
from moorage.system.build import build


def _read(line: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the verb would be called with; its signature is the verb's own."""
    verb, rest = find(line)
    assert verb is not None
    act = verb.load()
    called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def seen(*words: Any, **named: Any) -> int:
        called.append((words, named))
        return 0

    seen.__wrapped__ = act  # type: ignore[attr-defined]
    seen.__annotations__ = act.__annotations__
    read(verb.name, seen, rest)()
    return called[0]


@pytest.mark.parametrize(
    ("line", "words", "named"),
    [
        ("ls", (), {"options": RowOptions()}),
        (
            "ls --limit 3 --state RUNNING --state queued",
            (),
            {"limit": 3, "chosen": Chosen(None, ["RUNNING", "queued"])},
        ),
        ("ls a-* --limit=3 --json", ("a-*",), {"limit": 3, "options": RowOptions(json=True)}),
        ("show a,b c --json", ("a,b", "c"), {"options": RowOptions(json=True)}),
        ("show a --watch b", ("a", "b"), {"watch": True}),
        ("show a --nats nats://h:1 --color never", ("a",), {"options": RowOptions(nats="nats://h:1", color="never")}),
        ("drain n07 --tenant t", ("n07",), {"options": Options(tenant="t")}),
        ("events", (None,), {}),
        ("events a", ("a",), {}),
        ("submit -f -", (), {"file": "-"}),
        ("run --gpu -- x --gpu", ("x", "--gpu"), {"flags": JobFlags(gpu="1")}),
        ("run --gpu --json -- x", ("x",), {"flags": JobFlags(gpu="1"), "options": Options(json=True)}),
        ("run --gpu 2xH100 -- x", ("x",), {"flags": JobFlags(gpu="2xH100")}),
        ("run --gpu 2xH100 train", ("train",), {"flags": JobFlags(gpu="2xH100")}),
        ("run -- -x --", ("-x", "--"), {}),
        ("submit --cpu 0.5 --priority -1 -- x", ("x",), {"flags": JobFlags(cpu=0.5, priority=-1)}),
        ("change j --time-limit -1h30m", ("j",), {"time_limit": "-1h30m"}),
        ("submit --env A=1 --env B=-2 --gang -- x", ("x",), {"flags": JobFlags(env=["A=1", "B=-2"], gang=True)}),
        ("drain a --within 1h b", ("a", "b"), {"within": "1h"}),
        ("submit --on-no-match wait -- x", ("x",), {"flags": JobFlags(on_no_match="wait")}),
        ("scheduler --replicas 3", (), {"flags": SchedulerFlags(replicas="3")}),
    ],
)
def test_a_line_becomes_what_the_signature_says(
    line: str, words: tuple[Any, ...], named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    got_words, got = _read(line.split(), monkeypatch)
    assert got_words == words
    assert {name: got[name] for name in named} == named


@pytest.mark.parametrize(
    "line",
    [
        "ls --limit many",
        "ls --limit",
        "ls --lim 3",
        "events one extra",
        "ls --json=true",
        "ls --color pink",
        "uncancel",
        "run train --fast",
        "run a -- b",
        "submit --priority high -- x",
        "submit --priority 1_0 -- x",
        "submit --priority ٣ -- x",
        "submit --cpu 1_0 -- x",
        "get j --out=",
        "scheduler --replica 2",
        "completion csh",
    ],
)
def test_what_is_none_is_refused(line: str) -> None:
    verb, rest = find(line.split())
    assert verb is not None
    with pytest.raises(CannotRead):
        read(verb.name, verb.load(), rest)


@pytest.mark.parametrize(
    ("line", "why", "fixes"),
    [
        ("get", "JOB is missing", ("moorage ls", "moorage get --help")),
        ("cordon", "WORKER is missing", ("moorage fleet", "moorage cordon --help")),
        (
            "admin nats-config --out x",
            "--tenant is missing",
            (
                "moorage admin nats-config --out site --tenant vision --worker n01",
                "moorage admin nats-config --help",
            ),
        ),
        ("sbatch", "SCRIPT is missing", ("moorage sbatch job.sh", "moorage sbatch --help")),
        (
            "submit --hold=no -- x",
            "--hold takes no value, found 'no'",
            ("--hold, true in a file; or leave it out", "moorage submit --help"),
        ),
        (
            "cordon n1 --for 2h",
            "no option --for: cordon lasts until uncordon, and its jobs go on",
            ("moorage drain WORKER --for 2h",),
        ),
    ],
)
def test_what_is_missing_is_named_with_what_lists_it(line: str, why: str, fixes: tuple[str, ...]) -> None:
    verb, rest = find(line.split())
    assert verb is not None
    with pytest.raises(CannotRead) as found:
        read(verb.name, verb.load(), rest)
    assert (str(found.value), found.value.fixes) == (why, fixes)


def test_every_verb_describes_all_that_it_takes() -> None:
    for verb in all_verbs().values():
        for one in arguments_of(verb.load()):
            assert one.parameter.help.endswith("."), (verb.name, one.field)
            assert one.value or one.is_switch
    assert {one.group for one in arguments_of(submit.submit)} == {"", "Job", "Common"}


def test_an_answer_that_this_release_cannot_read_is_an_error_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_a_later_release(*_: object, **__: object) -> int:
        return int(msgspec.convert("soon", int))

    monkeypatch.setattr(ls, "with_client", of_a_later_release)
    assert main.run(["ls"]) == EXIT_FAILED
    told = " ".join(capsys.readouterr().err.split())
    assert f"error[unread-answer]: this client is of release {build()}, and cannot read the scheduler's answer" in told


def test_a_verb_of_two_words_is_found_by_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = verbs.Verb("tool list", "moorage.cli.jobs.ls:ls", "As ls.")
    monkeypatch.setitem(verbs.VERBS, verbs.FLEET, (*verbs.VERBS[verbs.FLEET], two))
    assert find(["tool", "list", "--json"]) == (two, ["--json"])
    assert two.load() is ls.ls
    assert below("tool") == [two]
    assert main.run(["tool"]) == 0
    assert "list  As ls." in capsys.readouterr().out
    assert main.run([]) == 0
    assert "  tool      list." in capsys.readouterr().out
    assert main.run(["tool", "lst"]) == 2
    assert "moorage tool list --help" in capsys.readouterr().err
    assert main.run(["tool", "list", "--help"]) == 0
    assert "usage: moorage tool list" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "fixes"),
    [
        ("run --gpus 2xH100 -- true", ("moorage run --gpu 2xH100 -- true", "moorage run --help")),
        ("run --gpus 2 -- prog --gpus 2", ("moorage run --gpu 2 -- prog --gpus 2", "moorage run --help")),
        ("logs --nofollow train", ("moorage logs --no-follow train", "moorage logs --help")),
        ("logs --no-folow", ("moorage logs --no-follow", "moorage logs --help")),  # and not that JOB is missing
        ("admin limit --tenat vision", ("moorage admin limit --tenant vision", "moorage admin limit --help")),
        ("admin feature-level --nope", ("moorage admin feature-level --help",)),
        ("admin backup --tenant vision TO", ("moorage admin backup --help",)),  # --nats is no kind of --tenant
        ("logs --flow train", ("moorage logs --follow train", "moorage logs --help")),
        ("worker --timeout 1s", ("moorage worker --help",)),
        ("ls --context prod", ("moorage ls --nats prod", "moorage ls --help")),
        ("up --context prod", ("moorage up --help",)),
        ("worker --secrets-dir d", ("moorage worker --secrets d", "moorage worker --help")),  # the setting's key
        ("submit --from-file lrs.txt -- true", ("moorage submit --help",)),  # no fix is better than a wrong one
        ("submit --tasks 1-100 -- true", ("moorage submit --help",)),
        ("ls --all", ("moorage ls --help",)),
        ("cordon n07 --reason hot", ("moorage cordon n07 --why hot", "moorage cordon --help")),
        ("cancel a --why old", ("moorage cancel a --reason old", "moorage cancel --help")),
    ],
)
def test_a_mistyped_option_is_told_as_the_one_that_was_meant(line: str, fixes: tuple[str, ...]) -> None:
    verb, rest = find(line.split())
    assert verb is not None
    with pytest.raises(CannotRead, match="no option --") as caught:
        read(verb.name, verb.load(), rest)
    assert caught.value.fixes == fixes


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("submit --nodes=2 -- true", "--hosts 4 --gpu 8xH100"),
        ("run --gres=gpu:2 -- true", "--gpu 2xH100"),
        ("submit --exclusive -- true", "--gpu 8xH100"),
        ("run --time=12:00:00 -- true", "--time-limit 12h"),
        ("submit --partition=gpu -- true", "--tenant NAME"),
        ("submit --requeue -- true", "--retries 2"),
        ("submit --signal=USR1@60 -- true", "--checkpoint-signal SIGUSR1"),
    ],
)
def test_an_option_of_sbatch_is_told_as_what_does_the_same_here(line: str, fix: str) -> None:
    """--partition was told as --on-partition, --requeue as --queue, and the others as nothing."""
    verb, rest = find(line.split())
    assert verb is not None
    with pytest.raises(CannotRead, match="no option --") as caught:
        read(verb.name, verb.load(), rest)
    assert " of sbatch: " in caught.value.fixes[0]
    assert fix in caught.value.fixes[0]
    assert caught.value.fixes[1] == "moorage help slurm"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("submit -J train -- true", "--job train: the job's id"),
        ("submit -p gpu -- true", "--tenant NAME"),
        ("submit -N 2 -- true", "--hosts 4 --gpu 8xH100"),
        ("run --name train -- true", "--job NAME"),
        ("run --num-gpus 1 -- true", "--gpu 2xH100"),
        ("run --detach -- true", "moorage submit"),
        ("run -e A=1 -- true", "--env NAME=VALUE"),
        ("run --working-dir . -- true", "--with DIR"),
        ("run --host n07 -- true", "--requires LABEL=VALUE"),
        ("submit --depends-on prep -- true", "--after JOB"),
    ],
)
def test_an_option_of_another_tool_is_told_as_what_does_the_same_here(line: str, fix: str) -> None:
    """--detach was told as --each, --host as --hosts, and the others as nothing."""
    verb, rest = find(line.split())
    assert verb is not None
    with pytest.raises(CannotRead, match="no option -") as caught:
        read(verb.name, verb.load(), rest)
    assert fix in caught.value.fixes[0]


@pytest.mark.parametrize(
    "line",
    [
        "submit --time-limit 60 -- x",
        "run --deadline 1.5 -- x",
        "again j --time-limit 60",
        "wait j --at-most 5",
        "ls --timeout 5",
        "drain w --within 30",
        "drain w --from 2",
        "drain w --for 2",
        "usage --since 24",
        "scheduler --reserve-after 600",
        "submit --at 2 -- x",
        "top --at 2",
    ],
)
def test_a_duration_wants_a_unit_as_a_size_does(line: str) -> None:
    verb, rest = find(line.split())
    assert verb is not None
    number = next(word for word in line.split() if word[0].isdecimal())
    with pytest.raises(CannotRead, match=f"a duration without a unit: '{number}'; write {number}s, {number}m"):
        read(verb.name, verb.load(), rest)


@pytest.mark.parametrize(
    "line", ["run --grace 0 -- x", "run --grace 0s -- x", "submit --at 22:00 -- x", "scheduler --lease-s 20"]
)
def test_no_time_at_all_a_clock_and_an_option_that_names_its_unit_want_none(line: str) -> None:
    verb, rest = find(line.split())
    assert verb is not None
    read(verb.name, verb.load(), rest)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("--tenant a run -- ls --context b", "moorage run --tenant a -- ls --context b"),
        ("--context prod ls", "moorage ls --nats prod"),
        ("--nope -- ls", "moorage --help"),
    ],
)
def test_options_before_the_verb_are_moved_behind_it_and_not_into_the_jobs_command(
    capsys: pytest.CaptureFixture[str], line: str, fix: str
) -> None:
    assert main.run(line.split()) == EXIT_USAGE
    assert f"fix: {fix}\n" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["up", "scheduler", "worker", "errors", "schema"])
@pytest.mark.parametrize("option", ["--tenant x", "--timeout 1s"])
def test_a_verb_that_asks_no_scheduler_takes_no_option_that_would_do_nothing(verb: str, option: str) -> None:
    with pytest.raises(CannotRead, match="no option"):
        read(verb, all_verbs()[verb].load(), option.split())


def test_up_starts_its_own_server_and_is_told_of_no_other() -> None:
    with pytest.raises(CannotRead, match="no option --nats"):
        read("up", all_verbs()["up"].load(), ["--nats", "prod"])


def test_a_mistyped_group_is_told_as_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["adminn", "limit"]) == 2
    assert "fix: moorage admin --help" in capsys.readouterr().err


def test_what_a_value_may_be_and_where_a_file_goes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["submit", "--priority", "high", "--", "x"]) == EXIT_USAGE
    assert "fix: --priority takes: 0..100, higher first; 50 if it is not given." in capsys.readouterr().err
    assert main.run(["run", "-f", "requests.json"]) == EXIT_USAGE
    assert "fix: moorage submit -f FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("admin limit vision --gpus 2", "moorage admin limit --tenant vision --gpus 2"),
        ("usage vision", "moorage usage --tenant vision"),
        ("usage vision --tenant speech", "moorage usage --help"),
        ("forward note", "moorage forward notebook 8888"),
    ],
)
def test_a_word_that_is_too_many_or_missing_is_told_with_a_whole_line(line: str, fix: str) -> None:
    verb, rest = find(line.split())
    assert verb is not None
    with pytest.raises(CannotRead) as caught:
        read(verb.name, verb.load(), rest)
    assert caught.value.fixes[0] == fix
