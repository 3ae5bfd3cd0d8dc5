"""What a job takes from the shell of its submit: variables, and the Python of the active environment; and what of its
command line is likely to be meant otherwise."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from moorage.cli.framework.console import print_err
from moorage.cli.jobs.env_file import lines_of, named, plain
from moorage.client.durations import seconds
from moorage.client.errors import Rejected, rejected
from moorage.client.own_python import head_of, path_of, words_of
from moorage.schemas.reserved_variables import is_secret_name, stored_as

if TYPE_CHECKING:
    from moorage.schemas.job import Request

#: a --timeout from here on is no wait for a scheduler
_LONG_S: Final = 300.0


def variables(given: Sequence[str], files: Sequence[str]) -> dict[str, str]:
    """Return the variables of --env and --env-file, the former over the latter.

    A name without a value has the value that it has here. Raises `Rejected` for one that is not set, and for one whose
    value looks like a secret, which --secret passes on without showing it.
    """
    found: dict[str, str] = {}
    for file in files:
        found |= _in_file(file)
    own: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        said = value if equals and name else _here("--env", name)
        if own.get(name, said) != said:
            print_err(f"warning[env]: --env has {name} twice: the last value counts")
        own[name] = said
    return found | own


def _in_file(file: str) -> Iterator[tuple[str, str]]:
    """Yield the variables of a file. Raises `Rejected`."""
    for where, name, text in lines_of(file):
        if text is not None and is_secret_name(name):
            raise _is_secret(where, name)
        yield named(where, name), _here(where, name) if text is None else plain(where, text)


def _here(where: str, name: str) -> str:
    """Return the value that a variable has in this process. Raises `Rejected`."""
    if not name:
        raise rejected(
            "invalid-argument", f"{where}: a variable without a name", next="--env NAME=VALUE, or --env NAME"
        )
    if is_secret_name(name):
        raise _is_secret(where, name)
    value = os.environ.get(name)
    if value is None:
        raise rejected(
            "invalid-argument", f"{where}: the variable {name[:40]} is not set here", field="$.run.env",
            found=name[:40], next=f"export {name[:40]} first, or give its value: --env {name[:40]}=VALUE",
        )  # fmt: skip
    return value


def _is_secret(where: str, name: str) -> Rejected:
    return rejected(
        "invalid-argument",
        f"{where}: {name} looks like a secret, and its value would be in the request, the ledger and `moorage show`",
        field="$.run.env", found=name,
        next=f"--secret {name}={stored_as(name)}, with the value in the file {stored_as(name)} of the folder of "
        "secrets of each worker (its setting `secrets`)",
    )  # fmt: skip


def own_program(command: Sequence[str], driver: str | None, setup: str | None) -> Sequence[str]:
    """Return the command with the path of its program, if that is of the active Python environment. Say so."""
    path = path_of(command, driver, setup)
    if not path:
        return command
    print_err(words_of(command[0], path))
    return [path, *command[1:]]


#: scripts whose options for Slurm are options of the job already
_read: Final[set[str]] = set()


def has_read(script: str) -> None:
    """Say nothing of the options of this script: they are read."""
    _read.add(script)


def warn_of_sbatch(request: Request) -> None:
    """Say that the options of a script for Slurm are not read, if the command names one.

    Raises `Rejected` if the command is the script's name alone, which no worker has among its programs.
    """
    for at, word in enumerate(request.workload.argv):
        if word not in _read and os.path.isfile(word) and re.search(rb"^#SBATCH\s", head_of(word), re.MULTILINE):
            if at == 0 and "/" not in word:
                raise rejected(
                    "invalid-argument", f"{word} is a script for sbatch, and its #SBATCH lines are comments here",
                    field="$.run.argv", found=word,
                    next=f"moorage sbatch {word} says what they are here, and with --submit submits it",
                )  # fmt: skip
            print_err(
                f"warning[sbatch]: the #SBATCH lines of {word} are comments here: give them as options, such as --gpu "
                f"for --gres, --time-limit for --time and --job for --job-name; moorage sbatch {word} reads them"
            )


def warn_of_timeout(timeout: str | None, time_limit: str | None) -> None:
    """Say that --timeout does not bound the job, where it is so long that it was surely meant for that."""
    if timeout is None or time_limit is not None:
        return
    with contextlib.suppress(Rejected):  # it is refused where it is read
        if seconds(timeout) >= _LONG_S:
            own = f"the job's own: --time-limit {timeout}"
            print_err(f"warning[timeout]: --timeout {timeout} bounds the wait for answers; {own}")
