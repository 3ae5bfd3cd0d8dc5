"""A plain line means the same with cyclopts and without it, and what is not plain is left to cyclopts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from moorage.cli import quick, verbs
from moorage.cli.main import VERBS, application
from moorage.cli.options import DEFAULTS, Options
from moorage.cli.submit import NO_FLAGS, JobFlags

LINES = [
    "ls",
    "ls --json",
    "fleet --json --tenant a",
    "show last",
    "show a,b c --json",
    "show a --nats nats://h:1 --timeout 3s --color never",
    "--json show a",
    "cancel a b",
    "explain no-match",
    "wait",
    "wait all --json",
    "drain n07",
    "audit --timeout 1m",
    "errors",
    "errors queue-full --json",
    "schema event",
    "submit",
    "submit --driver noop",
    "submit --gpu 2xH100:80G --priority 70 --env A=1 --env B=2 --gang --json -- python train.py --gpu x",
    "run --gpu 1 --time-limit 10m --tenant a -- sh -c x",
    "run -- -x",
]
NOT_PLAIN = [
    "",
    "--help",
    "ls --help",
    "ls -h",
    "ls --limit 3",
    "ls --state RUNNING",
    "ls --watch",
    "ls extra",
    "ls --json=true",
    "ls --no-json",
    "ls --tenant",
    "ls --tenant --json",
    "ls --tenant=a",
    "ls --tenant a --tenant b",
    "ls --color pink",
    "show",
    "show -- -x",
    "show a --watch",
    "cancel a --reason why",
    "drain",
    "drain a b",
    "wait --at-most 3s a",
    "errors a b",
    "submit --gpu",
    "submit sleep 60",
    "submit --cpu 0.5 -- x",
    "submit --priority high -- x",
    "submit --priority -1 -- x",
    "submit --on-no-match wait -- x",
    "submit -f request.json",
    "submit --no-gang -- x",
    "run --gpu 1 --gpu 2 -- x",
    "no-such-verb",
]


@pytest.mark.parametrize("line", [line for line in LINES if not line.startswith("-")])
def test_both_readings_are_one(line: str) -> None:
    words = line.split()
    read = quick.read(words)
    assert read is not None
    verb, bare, options, flags = read
    act, bound, ignored = application(verb).parse_args(words, exit_on_error=False, print_error=False)
    assert act is getattr(verbs, verb)
    assert not ignored
    arguments = dict(bound.arguments)
    assert arguments.pop("options", DEFAULTS) == Options(**options)
    assert arguments.pop("flags", NO_FLAGS) == JobFlags(**flags)
    assert _flat(arguments) == bare


@pytest.mark.parametrize("line", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_cyclopts(line: str) -> None:
    assert quick.command(line.split()) is None


def test_every_plain_verb_is_one_of_the_command_and_in_the_same_place() -> None:
    where = {verb.name: verb.where for group in VERBS.values() for verb in group}
    assert {name: plain.where for name, plain in quick.PLAIN.items()} == {name: where[name] for name in quick.PLAIN}


def test_every_verb_can_be_loaded_and_no_other() -> None:
    for group in VERBS.values():
        for verb in group:
            assert callable(getattr(verbs, verb.name))
    with pytest.raises(AttributeError):
        _ = verbs.nothing


@pytest.mark.parametrize(
    "line",
    [
        "errors no-match",
        "submit --nats nats://127.0.0.1:1 --timeout 100ms -- x",
        "ls --nats nats://127.0.0.1:1 --timeout 100ms",
    ],
)
def test_a_plain_line_imports_neither_cyclopts_nor_the_core_nor_a_worker(line: str) -> None:
    script = (
        "import sys, os\n"
        "from moorage.cli import main\n"
        "def leave(code):\n"
        "    heavy = ('cyclopts', 'attrs', 'moorage.scheduler.service', 'moorage.worker', 'moorage.client.gather')\n"
        "    print(sorted(name for name in heavy if name in sys.modules), file=sys.stderr)\n"
        "    raise SystemExit(code)\n"
        "main.os._exit = leave\n"
        f"sys.argv = ['moorage', *{line.split()!r}]\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_the_groups_of_options_are_there_whichever_verb_is_first() -> None:
    """A process of its own: in this one some verb was loaded before."""
    for line in ("run --help", "ls --help"):
        done = subprocess.run([sys.executable, "-m", "moorage.cli", *line.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "--tenant" in done.stdout


def _flat(arguments: dict[str, Any]) -> list[str]:
    """The bare words among bound arguments."""
    words: list[str] = []
    for value in arguments.values():
        words += value if isinstance(value, tuple) else [value]
    return words
