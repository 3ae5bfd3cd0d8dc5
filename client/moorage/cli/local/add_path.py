"""`moorage add-path`: runs a command with the paths of TF_PATH and related variables, as processes of jobs have
them."""

from __future__ import annotations

import os
import signal
from typing import Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.exit_codes import exit_code_of_start
from moorage.cli.framework.options import LOCAL, LocalOptions, guarded
from moorage.schemas.errors import MoorageError, problem

#: Python ignores these, and what it executes would go on ignoring them
_IGNORED: Final = (signal.SIGPIPE, signal.SIGXFSZ)


def add_path(
    *command: Annotated[str, Parameter(help="What to run, after --.", command=True)],
    options: LocalOptions = LOCAL,
) -> int:
    """Run a command with PATH, LD_PRELOAD and LD_LIBRARY_PATH extended, in place of this process.

    TF_PATH, TF_LD_PRELOAD and TF_LD_LIBRARY_PATH are put behind what is there, TF_PREPEND_PATH, TF_PREPEND_LD_PRELOAD
    and TF_PREPEND_LD_LIBRARY_PATH before it. A folder that is there already stays where it is. Jobs have this without
    the command, in containers and virtual machines too. The exit code is that of the command; 127 if it is not found,
    126 if it cannot be executed.
    """
    code = 0

    def act() -> None:
        nonlocal code
        from moorage.system.device_environment import apply_tf_paths

        if not command:
            from moorage.client.errors import rejected

            raise rejected("invalid-argument", "add-path needs a command", next="moorage add-path -- COMMAND")
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvpe(command[0], command, apply_tf_paths(os.environ))
        except OSError as error:
            code = exit_code_of_start(error)
            told = problem("failed-precondition", f"{command[0]} cannot be executed: {error.strerror}")
            raise MoorageError(told) from None

    failed = guarded(options, act)
    return code or failed
