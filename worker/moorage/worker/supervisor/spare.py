"""A process that waits for the next start: in a cgroup of its own, with its pipes, it needs only to be told what to be.

A start that comes alone would else wait for the launcher to wake, for a clone into a cgroup, and for that child's turn
(docs/decisions/0039). The launcher makes the spare beforehand, the supervisor's child as all are; the request goes to
it by a socket, which its exec closes, and by which it says why it failed: to its supervisor it is the confirm pipe.

Only where cgroups prove an end: what tells by /proc whose a process is goes by when it began, which for a spare is
earlier than its member's start.
"""

import contextlib
import os
import select
import signal
import socket
from typing import Final

from moorage.worker.supervisor.child import Child, Request
from moorage.worker.supervisor.kit_pool import Kit

BYTES_MAX: Final = 16 * 1024
STRINGS_MAX: Final = 1024
"""Of a request, as in `launcher.c`: a larger one is the launcher's."""
OUT, ERR = 2, 3
"""Their places among the descriptors of a spare; the second is a memory file's in other packets."""
_GONE_S: Final = 1.0


def await_readable(descriptor: int, at_most_s: float) -> None:
    """Without the loop, at the end of something. Not by select(2), which knows no descriptor above 1023."""
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)
    readable.poll(at_most_s * 1000)


class Spare:
    """`pid` is 0 until the launcher has made it, and again once it is reaped, or a member's."""

    __slots__ = ("_theirs", "channel", "kit", "launched", "pid")

    def __init__(self, kit: Kit) -> None:
        """Raises `OSError`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.kit = kit
        self.pid = 0
        self.launched: object = None
        self.channel = ours.detach()
        self._theirs = theirs.detach()

    def descriptors(self) -> list[int]:
        """What goes to the launcher for it."""
        return [self._theirs, self.kit.stdout[1], self.kit.stderr[1], self.kit.folder]

    def passed(self) -> None:
        """The launcher has the ends that are the process's; here they are closed, so that its own end is heard."""
        for descriptor in self.descriptors():
            os.close(descriptor)

    def takes(self, child: Child, request: Request) -> bool:
        """Whether it can become this child: another user's gets a copy of the launcher's memory, not a share of it."""
        strings = len(child.paths) + len(child.argv) + child.variables + 4
        return child.ids is None and len(request) <= BYTES_MAX and strings <= STRINGS_MAX

    def become(self, request: Request) -> None:
        """Send it what it is to be. Raises `OSError` where it is gone: then nothing has begun."""
        os.write(self.channel, request)

    def close(self) -> None:
        """End it, if it is there, and release all that was made for it."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # not reaped, so that the number is surely its own
            self._reap()
        for descriptor in (self.channel, self.kit.stdout[0], self.kit.stderr[0]):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            assert self.kit.cgroup is not None
            self.kit.cgroup.remove()

    def _reap(self) -> None:
        """It waits in a read, so that it is gone in no time; its group is removed only then."""
        with contextlib.suppress(OSError):  # or the loop reaps it
            pidfd = os.pidfd_open(self.pid)
            try:
                await_readable(pidfd, _GONE_S)
            finally:
                os.close(pidfd)
            os.waitpid(self.pid, os.WNOHANG)
        self.pid = 0
