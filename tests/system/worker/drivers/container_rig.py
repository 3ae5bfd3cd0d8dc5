"""What the tests of docker and of podman have in common: a driver on its engine, and all that it reports."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Device, LogPage, ReadLog
from moorage.schemas.frames import Output as OutputFrame
from moorage.schemas.job import Request, Run
from moorage.worker.driver import Assignment, DriverEvent, Living
from moorage.worker.drivers.container.entry import PROGRAM
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.session.attempt_messages import NotStarted, StartFailed
from moorage.worker.supervisor.client import Supervised, SupervisorUnavailable
from tests.waiting import NeverHappened, until

NO_RULES: Final = Policy({}, {}, {}, None, {})
WAIT_S: Final = 90.0
#: the program that a container with secrets needs, as the driver names what it misses
NO_ENTRY: Final = f"{PROGRAM} does not run here: [Errno {errno.ENOENT}]"


class ContainerRig:
    """A driver, and all that it reports; `driver_name` is what a request calls it, `image` what runs by default."""

    driver_name: ClassVar[str]
    image: ClassVar[str]

    def __init__(self, driver: Any, link: SupervisorLink, devices: Sequence[Device]) -> None:
        self.driver = driver
        self.link = link
        self.devices = devices
        self.events: list[DriverEvent] = []
        self.frames: list[tuple[AttemptName, OutputFrame]] = []
        self.living: list[Living] = []
        driver.attach(
            self.events.append, lambda name, raw: self.frames.append((name, msgspec.json.decode(raw, type=OutputFrame)))
        )

    async def __aenter__(self) -> Self:
        self.living = await self.driver.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.driver.close()

    def start(self, job: str, *argv: str, image: str = "", **run: Any) -> AttemptName:
        of_request = {key: run.pop(key, None) for key in ("resources", "gpu", "service")}
        config = {self.driver_name: {key: run.pop(key) for key in ("ports", "shm_mib") if key in run}}
        asked = Run(driver=self.driver_name, image=image or self.image, argv=list(argv), **run)
        request = Request(run=asked, driver_config=config, **of_request)
        name = ("acme", job, 0, 1, 7)
        mode = request.gpu.effective_sharing if request.gpu else "exclusive"
        self.driver.check(request)
        self.driver.start([Assignment(name, request, list(self.devices), mode)])
        return name

    def told(self, kind: type, name: AttemptName) -> Any:
        """Return what it reported of this attempt in an event of that kind; None so far."""
        for event in self.events:
            if isinstance(event, kind):
                for each in getattr(event, "items", None) or [(one,) for one in getattr(event, "names", [])]:
                    if each[0] == name:
                        return each
        return None

    async def reported(self, kind: type, name: AttemptName) -> Any:
        try:
            return await until(lambda: self.told(kind, name) or self._is_over(name), deadline_s=WAIT_S)
        except NeverHappened:
            raise AssertionError(f"no {kind.__name__} of {name[1]}, but {self.events}") from None

    async def said(self, name: AttemptName, word: str, stream: str = "out") -> str:
        await until(lambda: word in self.live_output(name, stream) or self._is_over(name), WAIT_S, f"{word!r}")
        return self.live_output(name, stream)

    def _is_over(self, name: AttemptName) -> bool:
        """Fail at once for an attempt that never starts, or skip the test where nothing but a program is missing."""
        for kind in (NotStarted, StartFailed):
            if (refused := self.told(kind, name)) is None:
                continue
            if NO_ENTRY in str(refused):
                pytest.skip(f"there is no {PROGRAM.name} for secrets: python worker/build_launcher.py {PROGRAM}")
            raise AssertionError(f"{kind.__name__}: {refused}")
        return False

    async def page(self, name: AttemptName, stream: Any = "out") -> LogPage:
        ask = ReadLog("s", *name, driver=self.driver_name, stream=stream, offset=0, limit=1 << 16, ended_ms=1)
        page: LogPage = await self.driver.read_log(ask)
        return page

    async def output(self, name: AttemptName, stream: Any = "out") -> str:
        return (await self.page(name, stream)).text

    def live_output(self, name: AttemptName, stream: str = "out") -> str:
        return "".join(frame.text for of, frame in self.frames if of == name and frame.stream == stream)


@contextlib.asynccontextmanager
async def state_of(tmp_path: Path) -> AsyncIterator[Path]:
    """Give a state folder, and end its supervisor."""
    state = tmp_path / "s"
    state.mkdir(mode=0o700, parents=True)
    try:
        yield state
    finally:
        with contextlib.suppress(SupervisorUnavailable):
            last = await Supervised.connect(state, spawn_if_absent=False)
            await last.shutdown(0.0)
