"""Services of a `SimFleet`: each attempt of their job is a real member on the simulated NATS, with a function of the
test's own in place of a program."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from moorage.bus.connection import Connection
from moorage.calls.batches import Batches
from moorage.calls.function import BatchTasks, Taken
from moorage.calls.messenger import Messenger, Name
from moorage.calls.served import Context, Served
from moorage.calls.wire import Frames, FromProgram, ToProgram
from moorage.schemas.subjects import Subjects
from moorage.testing.bus.bus import SimulatedBus
from moorage.testing.sim_driver import Ran, Task

#: how long an attempt that is asked to end finishes its calls, in seconds
GRACE_S: Final = 10.0
#: minus SIGKILL
CODE_KILLED: Final = -9


class SimService:
    """A service of a `SimFleet`. `members` are the attempts that take calls now, by their names, as `embed/0`."""

    def __init__(self, name: Name, served: Served, load_s: float, job: str) -> None:
        self.name = name.service
        self.job = job
        self._name = name
        self._served = served
        self._load_s = load_s
        self._members: dict[str, asyncio.Event] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<SimService simulated {self.name}, {len(self._members)} members>"

    @property
    def members(self) -> list[str]:
        return list(self._members)

    def kill_member(self, member: str = "") -> None:
        """Kill the program of a member, by default of the one that serves for longest: the calls that run there fail
        with `member-died`, and its job starts another one. Raises KeyError if it does not serve."""
        if not self._members or (member and member not in self._members):
            raise KeyError(f"no member {member} serves {self.name}, but {', '.join(self._members) or 'none'}")
        self._members.pop(member or next(iter(self._members))).set()

    async def close(self) -> None:
        """Wait until every member that ends has ended."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def run(self, task: Task, bus: SimulatedBus) -> Ran:
        """Be one member, until it is killed or its attempt is ended."""
        spec = task.request.service
        assert spec is not None
        inbox = self._name.subjects.member_inbox(task.tenant)
        link = cast(Connection, bus.connect(task.worker, inbox_prefix=inbox))
        attempt = (task.tenant, task.job, task.replica, task.attempt, task.fence)
        messenger = Messenger(link, self._name, spec.concurrency, attempt, spec.input_bytes, queue=spec.queue)
        served = copy.copy(self._served)
        served.in_batches = spec.batch is not None
        program = _Function(served)
        messenger.program, program.on_frame = program, messenger.on_frame
        if spec.batch is not None:
            program.on_frame = messenger.run_in_batches(program, Batches(spec.batch, spec.concurrency))
        messenger.endpoints = frozenset(self._served.endpoints)
        killed, member = asyncio.Event(), f"{task.job}/{task.replica}"
        try:
            await asyncio.sleep(self._load_s)
            await messenger.open()
            await messenger.take()
            self._members[member] = killed
            await killed.wait()
            program.kill()
            await messenger.died()
            return Ran(CODE_KILLED)
        finally:
            if self._members.get(member) is killed:
                del self._members[member]
            leaving = asyncio.get_running_loop().create_task(_leave(messenger, program, link))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)


async def _leave(messenger: Messenger, program: _Function, link: Connection) -> None:
    """Let a member finish its calls, as at SIGTERM, and close its connection."""
    try:
        async with asyncio.timeout(GRACE_S):
            await messenger.drain()
    except TimeoutError:
        pass
    finally:
        messenger.give_up()
        program.kill()
        await messenger.close()
        await link.close()


class _Function:
    """The program of one member: a function, in this event loop. A plain one cannot be stopped while it runs."""

    def __init__(self, served: Served) -> None:
        self.on_frame: Callable[[FromProgram, bytes], None]
        self._frames = Frames()
        self._batches = BatchTasks(served, self)

    def send(self, head: ToProgram, body: bytes = b"") -> None:
        if head.cancel:
            self._batches.cancel(head.cancel)
        elif head.call:
            self.send_all([(head, body)])

    def send_all(self, frames: Sequence[tuple[ToProgram, bytes]]) -> None:
        self._batches.begin([Taken(head, body, Context(head)) for head, body in frames])

    def hold(self, on: bool) -> None:
        """Nothing is held: the simulated bus takes all there is."""

    def take_back(self) -> list[int]:
        """Nothing is sent ahead."""
        return []

    def kill(self) -> None:
        for task in self._batches.tasks:
            task.cancel()

    def write(self, data: bytes) -> None:
        for head, body in self._frames.feed(data):
            self.on_frame(head, body)

    async def drain(self) -> None:
        await asyncio.sleep(0)


def served_by(function: Callable[..., Any], prefix: str, tenant: str, service: str, load_s: float) -> SimService:
    """Return the service that a function answers, not yet started. Raises CannotServe for what is no function."""
    target = getattr(function, "__qualname__", type(function).__name__)
    made = Served(function, target)
    return SimService(Name(Subjects(prefix).prefix, tenant, service), made, load_s, service)
