"""The first lines of the `moorage` command. From here on, Ctrl-C ends it without a stack trace, as it ends any program.

A verb that has something to end in order uses `moorage.cli.framework.interrupts`. Before this module is loaded, only
Python itself runs, so it imports next to nothing.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line of this process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else who started it wants none, as nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moorage.system.lazy_imports import import_when_used

    import_when_used("aiohttp")  # nats-py imports it for web sockets, for half the time of a command
    from moorage.cli.main import main as run

    run()
