"""`moorage sbatch`: what a script for Slurm is here, and its submit."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Final

from moorage.cli.framework.arguments import Parameter, read
from moorage.cli.framework.console import emit, paint, print_err, print_out
from moorage.cli.framework.options import ROWS, RowOptions, guarded
from moorage.cli.jobs.from_shell import has_read
from moorage.cli.jobs.sbatch_script import Converted, converted
from moorage.cli.jobs.submit import submit as submit_verb
from moorage.client.errors import rejected

#: goes with a script that reads variables of Slurm, or calls srun
_NAMES: Final = Path(__file__).with_name("as_slurm.sh")
#: widest column of the options of a script
_LEFT_MAX: Final = 34


def sbatch(
    script: Annotated[str, Parameter(help="A script with #SBATCH lines.", value="SCRIPT")],
    /,
    *arguments: Annotated[str, Parameter(help="What the script gets as its arguments, after --.", command=True)],
    submit: Annotated[bool, Parameter(help="Submit it, as moorage submit does; without, only say what it is.")] = False,
    shared: Annotated[
        bool, Parameter(help="This folder is on the workers, too: start in it, and bring no files.")
    ] = False,
    job: Annotated[str | None, Parameter(help="The job's id; --job-name is a label.", value="ID")] = None,
    also: Annotated[
        str, Parameter(help="Further options of sbatch, which go before those of the script.", value="OPTIONS")
    ] = "",
    options: RowOptions = ROWS,
) -> int:
    """Say what a script for Slurm is here: each of its options, and the line of moorage submit; --submit submits it.

    This folder's content goes with the job, as a shared home does not. The script finds the variables of Slurm that it
    reads, and srun starts a process for each task.
    """

    def act() -> int:
        found, text = _read(script, also)
        words = _submit_words(script, text, arguments, found, shared=shared)
        words = ["--job", job, *words] if job is not None else words
        if not submit:
            _print(found, words, options)
            return 0
        for row in found.rows:
            if row.is_none:
                print_err(f"line {row.line}: {row.theirs}: {row.ours}" if row.line else f"{row.theirs}: {row.ours}")

        has_read(words[len(words) - len(arguments) - 1])

        @functools.wraps(submit_verb)
        def with_options(*command: str, **named: Any) -> int:
            return submit_verb(*command, **{**named, "options": options})

        return read("submit", with_options, words)() or 0

    return guarded(options, act)


def _read(script: str, also: str) -> tuple[Converted, str]:
    try:
        text = Path(script).read_text()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise rejected("invalid-argument", f"{script}: {why}", found=script, next="name a script for sbatch") from None
    if not text.startswith("#!"):
        raise rejected(
            "invalid-argument", f"{script} does not begin with #!: sbatch refuses it, too", found=script,
            next="begin it with #!/bin/bash",
        )  # fmt: skip
    return converted(text, shlex.split(also)), text


def _submit_words(script: str, text: str, arguments: tuple[str, ...], found: Converted, *, shared: bool) -> list[str]:
    """Return the words behind `moorage submit`."""
    path = os.path.relpath(script)
    is_below = not path.startswith("..")
    words = [*found.options]
    if found.needs_names:
        named = dict(found.env)
        if "--array" in words:
            named["SLURM_ARRAY_TASK_COUNT"] = str(_count(words[words.index("--array") + 1]))
        for name, value in named.items():
            words += ["--env", f"{name}={value}"]
        words += ["--with", str(_NAMES)]
    if shared:
        program = os.path.abspath(script)
        words += [] if "--cwd" in words else ["--cwd", os.getcwd()]
    else:
        program = path if is_below else os.path.basename(script)
        words += ["--with", "."] if is_below else ["--with", ".", "--with", script]
    shell = shlex.split(text.splitlines()[0][2:]) or ["/bin/bash"]
    if not found.needs_names:
        return [*words, "--", *shell, program, *arguments]
    # HOME is the attempt's own folder, to which files are brought
    start = ["sh", "-c", 'exec bash "$HOME/as_slurm.sh" "$@"', "sh"] if shared else ["bash", "as_slurm.sh"]
    return [*words, "--", *start, *shell, program, *arguments]


def _count(array: str) -> int:
    """Return how many numbers an option --array names."""
    numbers = 0
    for part in array.partition("%")[0].split(","):
        ends, _, step = part.partition(":")
        first, _, last = ends.partition("-")
        numbers += len(range(int(first), int(last or first) + 1, int(step or 1)))
    return numbers


def _print(found: Converted, words: list[str], options: RowOptions) -> None:
    line = shlex.join(["moorage", "submit", *words])
    if options.json:
        emit({"options": [row._asdict() for row in found.rows], "command": ["moorage", "submit", *words]})
        return
    left = min(max((len(row.theirs) for row in found.rows), default=0), _LEFT_MAX)
    for row in found.rows:
        ours = paint(row.ours, "yellow", sys.stdout) if row.is_none else row.ours
        where = f"{row.line:>4}" if row.line else "   -"
        print_out(f"{where}  {row.theirs:<{left}}  {ours}")
    print_out(f"\n{line}")
