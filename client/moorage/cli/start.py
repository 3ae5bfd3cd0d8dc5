"""The `moorage` command's first lines: from here on Ctrl-C ends it as it ends any program, without a stack trace.

Where a verb has something to end in order, `moorage.cli.framework.interrupts` takes over. What Python does before this
is loaded is not ours to guard, so it imports next to nothing.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line of this process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else who started it wants none, as nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moorage.cli.main import main as run

    run()
