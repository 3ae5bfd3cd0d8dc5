"""Keep track of one driver's containers on this host, with their names at the engine and the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from moorage.schemas.attempt import AttemptName
from moorage.worker.drivers.container.engine import Engine
from moorage.worker.drivers.container.output import left_path
from moorage.worker.drivers.container.terminal import ContainerTerminal
from moorage.worker.drivers.supervisor_link import SupervisorLink, key_of, owner_of
from moorage.worker.supervisor.capped_output import key_digest
from moorage.worker.supervisor.protocol import MARK_NAME
from moorage.worker.supervisor.protocol import Ended as ChildEnded

#: how long to wait for an engine that does not answer, and how long an ended container waits for its code and output
ENGINE_S: Final = 10.0
RETRY_S: Final = 0.5
LABEL: Final = "moorage.member"
LABEL_STATE: Final = "moorage.state"


class Attempt:
    """A container of this host, from its placement until its end is reported."""

    def __init__(self, name: AttemptName) -> None:
        self.name = name
        self.container = ""
        self.has_terminal: bool | None = None
        """Whether its program has a terminal that a caller may hold; None: the engine has not said it yet."""
        self.terminal: ContainerTerminal | None = None
        self.is_known = False
        """Whether the supervisor knows it, or may know it."""
        self.pid: int | None = None
        """Its init by the engine's word, 0 if it was over; None before its start."""
        self.is_removed = False
        """Whether the engine has removed it. Sent to each new supervisor, in case none received it."""
        self.has_begun = False
        """Whether the task of its start has taken its first step."""
        self.is_ending = False
        self.over: asyncio.Future[ChildEnded] = asyncio.get_running_loop().create_future()
        """The supervisor's report of its end."""
        self.task: asyncio.Task[None] | None = None


class ContainerHost:
    """The state that the parts of a container driver share."""

    def __init__(self, engine: Engine, link: SupervisorLink, worker: str, driver: str) -> None:
        self.engine = engine
        self.link = link
        self.worker = worker
        self.owner = owner_of(worker, driver)
        self.attempts: dict[AttemptName, Attempt] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        """What goes on in the background until the driver closes."""
        self._mark = ""
        self._terminals: set[ContainerTerminal] = set()

    @property
    def mark(self) -> str:
        """The mark of the state folder, and so of its containers. Raises OSError before a supervisor has made it."""
        self._mark = self._mark or (self.link.state / MARK_NAME).read_text()
        return self._mark

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin to run `work` in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def terminal(self, attempt: Attempt) -> ContainerTerminal:
        """Return a new terminal of a created container."""
        left = left_path(self.link.state, self.key(attempt.name))
        made = ContainerTerminal(self.engine, attempt.container, left, self._terminals.discard)
        self._terminals.add(made)
        return made

    def close_terminals(self) -> None:
        """Let go of all terminals; their containers go on."""
        for terminal in list(self._terminals):
            terminal.close()

    def key(self, name: AttemptName) -> str:
        return key_of(self.owner, name)

    def container_name(self, name: AttemptName) -> str:
        """Return the container name for an attempt: a second container with the same name cannot be created."""
        return f"moorage-{key_digest(f'{self.mark}|{self.key(name)}')}"

    def labels(self, name: AttemptName) -> dict[str, str]:
        tenant, job, replica, attempt, _ = name
        return {
            LABEL: self.key(name),
            LABEL_STATE: self.mark,
            "moorage.tenant": tenant,
            "moorage.job": job,
            "moorage.replica": str(replica),
            "moorage.attempt": str(attempt),
        }

    def ran(self, attempt: Attempt, pid: int) -> None:
        """Record that the engine has started an attempt's container, and inform the supervisor."""
        attempt.pid = pid
        self.link.ran(self.key(attempt.name), pid)

    async def container_of(self, name: AttemptName) -> str:
        """Return the id of an attempt's container, "" if the engine has none. Raises EngineDown, EngineError."""
        found = await self.engine.labelled(f"{LABEL}={self.key(name)}")
        return next((each for each, labels in found if labels.get(LABEL_STATE) == self.mark), "")

    async def left_behind(self) -> list[str]:
        """Return the ids of containers that earlier agents left and that belong to no attempt here."""
        found = await self.engine.labelled(f"{LABEL_STATE}={self.mark}")
        return [container for container, labels in found if self._is_left(labels)]

    def _is_left(self, labels: Mapping[str, str]) -> bool:
        key = labels.get(LABEL, "")
        is_here = any(self.key(name) == key for name in self.attempts)  # that attempt handles its container itself
        return key.partition("|")[0] == self.owner and not is_here
