"""The checks for drivers, on those that come with moorage; which check is left out where, and why, is fixed here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import pytest
import uvloop

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import refuse
from moorage.schemas.frames import Exec, Terminal
from moorage.schemas.job import Request
from moorage.system.cgroup import cgroup_of
from moorage.testing.conformance import CHECKS, DriverChecks
from moorage.testing.conformance.bench import AgentProcess, Bench
from moorage.worker import EmbeddedWorker, HandlerContext, WorkerSettings
from moorage.worker.driver import Assignment, Driver, DriverEvent, Living, Publish, ReportEvent
from moorage.worker.drivers.execution import Execution, Take
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.session.attempt_messages import Ended, Started
from moorage.worker.supervisor.protocol import StartAttempt
from tests.clusters import NODE, WORKER, cluster, why_no_cluster
from tests.engines import DockerEngine, engine, why_no_dockerd
from tests.guests import kernel, make_initramfs, why_no_vm
from tests.podmans import NOBODY, PodmanHome, podman_home, why_no_podman
from tests.unit.docs.markdown import DOCS, page

Job = dict[str, Any]

IMAGE: Final = "moorage-test:checks"
#: no other process of this host sleeps so long
CHILD_S: Final = f"1{os.getpid():07d}"
#: a process that a container leaves behind is looked for while the container runs, so many seconds
SEEN_S: Final = 3
HOW_TO: Final = (DOCS / "how-to" / "write-your-own-driver.md").read_text()


def limits_memory() -> bool:
    """Whether this host can bound the memory of a cgroup of version 2 below ours."""
    folder = cgroup_of()
    return folder is not None and "memory" in (folder / "cgroup.subtree_control").read_text().split()


def shell(script: str) -> Job:
    return {"run": {"argv": ["/bin/sh", "-c", script]}}


class Processes(DriverChecks):
    """How a job of processes does each thing."""

    slack_s = 60.0

    def exits(self, code: int) -> Job:
        return shell(f"exit {code}")

    def hangs(self) -> Job:
        return {"run": {"argv": ["sleep", "600"]}}

    def ignores_the_end(self) -> Job:
        return shell("trap '' TERM; echo ready; while :; do sleep 600; done")

    def prints(self, text: str) -> Job:
        return {"run": {"argv": ["echo", text]}}

    def shows_environment(self) -> Job:
        return {"run": {"argv": ["env"]}}

    def shows_folder(self) -> Job:
        return shell("touch here && pwd")

    def has_children(self, path: Path) -> Job:
        return shell(f"setsid sleep 600 & echo $! > {path}; wait")

    def leaves_behind(self, path: Path) -> Job:
        return shell(f"env -i setsid sleep 600 & echo $! > {path}")

    def saves(self, text: str) -> Job:
        return shell(f"trap 'echo {text}; exit 0' USR1; echo ready; while :; do sleep 0.1; done")

    def takes_memory(self, mib: int) -> Job:
        return {"run": {"argv": ["python3", "-c", f"len(bytearray({mib} << 20))"]}}


class TestProcess(Processes):
    driver = "process"
    dashes: ClassVar[dict[str, str]] = (
        {} if limits_memory() else {"limits": "this host cannot bound the memory of a cgroup"}
    )


class Containers(Processes):
    """How a job in a container does each thing that it does otherwise."""

    slack_s = 90.0

    async def _place(self, bench: Bench, name: AttemptName, kind: str, *words: Any, **fields: Any) -> None:
        fields["run"] = {"image": IMAGE} | fields.get("run", {})
        await super()._place(bench, name, kind, *words, **fields)

    def shows_folder(self) -> Job:
        return shell('touch here && test "$PWD $HOME" = "/work /work" && ls -id .')

    def has_children(self, path: Path) -> Job:
        return shell(f"setsid sleep {CHILD_S} & wait")

    def leaves_behind(self, path: Path) -> Job:
        return shell(f"env -i setsid sleep {CHILD_S} & sleep {SEEN_S}")

    def child(self, path: Path) -> int:
        """A container's pids are its own: it is found on this host by what it runs."""
        words = f"sleep\0{CHILD_S}\0".encode()
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if process.read_bytes() == words:
                    return int(process.parent.name)
        return 0

    def takes_memory(self, mib: int) -> Job:
        return {"run": {"argv": ["dd", "if=/dev/zero", "of=/dev/null", f"bs={mib}M", "count=1"]}}


@pytest.mark.slow
class TestDocker(Containers):
    driver = "docker"
    settings = '[driver.docker]\npull = "never"\ngangs_on_host = ["*"]\n'
    engine: ClassVar[contextlib.AbstractContextManager[DockerEngine]]
    before: ClassVar[str | None]

    @classmethod
    def setup_class(cls) -> None:
        """Start an engine, too, which an agent in a process of its own finds by DOCKER_HOST."""
        if why := why_no_dockerd():
            pytest.skip(why)
        super().setup_class()
        cls.engine = engine()
        docker, cls.before = cls.engine.__enter__(), os.environ.get("DOCKER_HOST")
        docker.make_image(IMAGE)
        os.environ["DOCKER_HOST"] = f"unix://{docker.socket}"

    @classmethod
    def teardown_class(cls) -> None:
        os.environ.pop("DOCKER_HOST")
        if cls.before is not None:
            os.environ["DOCKER_HOST"] = cls.before
        cls.engine.__exit__(None, None, None)
        super().teardown_class()


#: how an agent in a process of its own finds this storage
SOCKET: Final = "MOORAGE_DRIVER_PODMAN_SOCKET"
HOME: Final = "MOORAGE_TEST_PODMAN_HOME"
NO_LIMITS: Final = "rootless podman sets limits only where cgroups of version 2 are its user's"


@pytest.mark.slow
class TestPodman(Containers):
    driver = "podman"
    settings = '[driver.podman]\npull = "never"\ngangs_on_host = ["*"]\n'
    user: ClassVar[int] = 0
    stack: ClassVar[contextlib.ExitStack]

    @classmethod
    def setup_class(cls) -> None:
        """Make storage with an image, too."""
        if why := why_no_podman():
            pytest.skip(why)
        super().setup_class()
        cls.stack = contextlib.ExitStack()
        home = cls.stack.enter_context(podman_home(cls.user))
        home.make_image(IMAGE)
        os.environ |= {SOCKET: str(home.socket), HOME: str(home.folder)}

    @classmethod
    def teardown_class(cls) -> None:
        for name in (SOCKET, HOME):
            os.environ.pop(name)
        cls.stack.close()
        super().teardown_class()


class Rootless(TestPodman):
    """The same with an agent, a supervisor and containers of a user that is not root."""

    user = NOBODY
    dashes: ClassVar[dict[str, str]] = {
        "limits": NO_LIMITS,
        "end_during_open": "the check ends attempts at the supervisor, which only its own user may ask",
    }

    @contextlib.asynccontextmanager
    async def serve(self, settings: WorkerSettings, url: str) -> AsyncIterator[None]:
        if os.geteuid() != 0:
            async with super().serve(settings, url):
                yield
            return
        home = PodmanHome(Path(os.environ[HOME]), self.user)
        home.give(settings.state_dir.parent)
        agent = AgentProcess(type(self), settings, url)
        process = await asyncio.create_subprocess_exec(*home.as_user(), *agent.command, env=home.environment())
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


class Functions:
    """A service that offers a function for each thing that a check needs."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()

    async def hang(self, context: HandlerContext) -> None:
        await self.goes_on.wait()

    async def ignore(self, context: HandlerContext) -> None:
        context.progress(0.0, "ready")
        while not self.goes_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.goes_on.wait()

    async def save(self, context: HandlerContext) -> None:
        context.progress(0.0, "ready")
        await context.until_checkpoint()
        context.progress(1.0, context.arguments[0])  # its value is not kept: it was asked to end

    async def give(self, context: HandlerContext) -> str:
        return context.arguments[0]

    async def environment(self, context: HandlerContext) -> dict[str, str]:
        return dict(context.environment)

    async def exit(self, context: HandlerContext) -> None:
        assert context.arguments[0] == "0"


class TestHandler(DriverChecks):
    slack_s = 60.0
    dashes: ClassVar[dict[str, str]] = {
        "exit_code": "a function that raises has the code 1, whatever it raises",
        "children": "a function is no process of its own; the processes that it starts belong to the service",
        "proof": "a function is no process of its own; the processes that it starts belong to the service",
        "attempts_of": "all functions run in the service's process, so that no process is one job's",
        "limits": "functions run in the service's process, which has one limit as a whole",
        "folder": "functions run in the service's process, which has one folder",
    }

    def exits(self, code: int) -> Job:
        return {"run": {"argv": ["exit", str(code)]}}

    def hangs(self) -> Job:
        return {"run": {"argv": ["hang"]}}

    def ignores_the_end(self) -> Job:
        return {"run": {"argv": ["ignore"]}}

    def prints(self, text: str) -> Job:
        return {"run": {"argv": ["give", text]}}

    def saves(self, text: str) -> Job:
        return {"run": {"argv": ["save", text]}}

    def shows_environment(self) -> Job:
        return {"run": {"argv": ["environment"]}}

    def environment(self, output: str) -> dict[str, str]:
        return dict(msgspec.json.decode(output.splitlines()[-1])["value"])

    @contextlib.asynccontextmanager
    async def serve(self, settings: WorkerSettings, url: str) -> AsyncIterator[None]:
        functions, worker = Functions(), EmbeddedWorker(url, settings)
        for name in ("hang", "ignore", "save", "give", "environment", "exit"):
            worker.handler(name)(getattr(functions, name))
        async with worker:
            yield
            functions.goes_on.set()


class Vm(Processes):
    """Each job boots a VM, which takes seconds without KVM."""

    driver = "vm"
    slack_s = 120.0
    open_jobs = 2
    dashes: ClassVar[dict[str, str]] = {
        "children": "what a job starts is in its VM, with no pid on the host; QEMU is a child of the job's process",
        "proof": "what a job starts is in its VM, with no pid on the host; QEMU is a child of the job's process",
        "attempts_of": "what a job starts is in its VM, with no pid on the host; QEMU is a child of the job's process",
        "devices": "a VM has one GPU at most, and the check asks for two",
        "folder": "each VM has its folder at /work, so that its path says nothing",
        "gang": "the ranks of a gang cannot meet: a VM has no network",
    }

    def takes_memory(self, mib: int) -> Job:
        return {"run": {"argv": ["dd", "if=/dev/zero", "of=/dev/null", f"bs={mib}M", "count=1"]}}

    @contextlib.asynccontextmanager
    async def serve(self, settings: WorkerSettings, url: str) -> AsyncIterator[None]:
        folder = settings.state_dir.parent / "image"
        folder.mkdir(exist_ok=True)
        type(
            self
        ).settings = f'[driver.vm]\nkernel = "{kernel()}"\ninitramfs = "{make_initramfs(folder)}"\nboot = 110\n'
        async with super().serve(settings, url):
            yield


def leave_to_release(kind: type[DriverChecks], checks: Collection[str]) -> None:
    """Keep of all checks only these: `tests/release/drivers` runs every one."""
    for check in {*CHECKS} - {*checks}:
        setattr(kind, f"test_{check}", None)


@pytest.mark.slow
class TestRootless(Rootless):
    pass


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_vm()), reason=why_no_vm())
class TestVm(Vm):
    pass


leave_to_release(TestRootless, ("start", "agent_killed", "secrets"))
leave_to_release(TestVm, ("output", "agent_killed", "fence"))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(400)
class TestKubernetes(Containers):
    """Pods on a real API server, whose kubelet is played: it runs them as processes of this host."""

    driver = "kubernetes"
    dashes: ClassVar[dict[str, str]] = {
        "limits": "the kubelet bounds a pod's memory, and the tests have none of their own",
        "proof": "the kubelet proves the end of a pod, and the tests have none of their own",
        "notice": "a pod gets no checkpoint signal: Kubernetes sends SIGTERM, and SIGKILL after the grace",
        "attempts_of": "the processes of a pod are known to its kubelet alone",
        "gang": "the driver runs no gang: a rank lost with its node is kept, and would block the others",
    }
    stack: ClassVar[contextlib.ExitStack]

    @classmethod
    def setup_class(cls) -> None:
        if why := why_no_cluster():
            pytest.skip(why)
        super().setup_class()
        cls.stack = contextlib.ExitStack()
        server, _ = cls.stack.enter_context(cluster())
        for key, value in (("NODE", NODE), ("KUBECONFIG", str(server.kubeconfig(WORKER)))):
            os.environ[f"MOORAGE_DRIVER_KUBERNETES_{key}"] = value  # an agent in a process of its own finds them there

    @classmethod
    def teardown_class(cls) -> None:
        for key in ("NODE", "KUBECONFIG"):
            os.environ.pop(f"MOORAGE_DRIVER_KUBERNETES_{key}")
        cls.stack.close()
        super().teardown_class()

    def shows_folder(self) -> Job:
        return shell("touch here && ls -id .")  # in /work, which a process of this host has elsewhere


#: the drivers that come with moorage, and the checks that are not for them: all others pass. `limits` of processes
#: needs a host that can bound memory
TABLE: Final[dict[str, set[str]]] = {
    "process": set(),
    "handler": {"exit_code", "children", "proof", "attempts_of", "limits", "folder"},
    "docker": set(),
    "vm": {"children", "proof", "attempts_of", "devices", "folder", "gang"},
    "podman": set(),
    "podman, rootless": {"limits", "end_during_open"},
    "kubernetes": {"limits", "proof", "notice", "attempts_of", "gang"},
}
KINDS: Final[dict[str, type[DriverChecks]]] = {
    "process": TestProcess,
    "handler": TestHandler,
    "docker": TestDocker,
    "podman": TestPodman,
    "podman, rootless": Rootless,
    "vm": Vm,
    "kubernetes": TestKubernetes,
}


def test_each_driver_passes_all_checks_but_its_dashes_and_the_page_has_each_check() -> None:
    for driver, missing in TABLE.items():
        kind = KINDS[driver]
        assert set(kind.dashes) - {"limits"} == missing - {"limits"}, driver
        assert {name for name in CHECKS if callable(getattr(kind, f"test_{name}"))} == {*CHECKS} - {*kind.dashes}
    rows = [line for line in HOW_TO.splitlines() if line.startswith("| `")]
    assert {name for name in CHECKS if not any(row.startswith(f"| `{name}` |") for row in rows)} == set()


def test_a_dash_names_a_check_and_says_why() -> None:
    for dashes in ({"folders": "no such check"}, {"folder": " "}):
        with pytest.raises(TypeError, match="dashes of Own must name checks, each with a reason"):
            type("Own", (DriverChecks,), {"dashes": dashes})
    with pytest.raises(TypeError, match="Forgot must define exits, or name the checks that need it"):
        type("Forgot", (DriverChecks,), {})().exits(0)


# -------------------------------------------------------------------- a driver with a fault, and the check that sees it


class Faulty(ProcessDriver):
    """A driver of processes whose subclasses have one fault each."""

    name = "faulty"

    def attach(self, report: ReportEvent, publish: Publish) -> None:
        super().attach(partial(self.tell, report), publish)

    def tell(self, report: ReportEvent, event: DriverEvent) -> None:
        report(event)

    def variables(self, environment: dict[str, str]) -> dict[str, str]:
        return environment

    def _start_attempt(self, assignment: Assignment) -> StartAttempt:
        made = super()._start_attempt(assignment)
        return msgspec.structs.replace(made, env=self.variables(dict(made.env)))


class TellsNoStart(Faulty):
    def tell(self, report: ReportEvent, event: DriverEvent) -> None:
        if not isinstance(event, Started):
            report(event)


class LosesTheCode(Faulty):
    def tell(self, report: ReportEvent, event: DriverEvent) -> None:
        report(Ended([(name, 0, why) for name, _, why in event.items]) if isinstance(event, Ended) else event)


class SaysNothing(Faulty):
    def attach(self, report: ReportEvent, publish: Publish) -> None:
        super().attach(report, lambda name, payload: None)


class CallsAnyEndAnExit(Faulty):
    def tell(self, report: ReportEvent, event: DriverEvent) -> None:
        report(Ended([(name, code, "exit") for name, code, _ in event.items]) if isinstance(event, Ended) else event)


class GivesNoGrace(Faulty):
    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        super().end(name, 0.0, why)


class KnowsNoTimeout(Faulty):
    def _start_attempt(self, assignment: Assignment) -> StartAttempt:
        return msgspec.structs.replace(super()._start_attempt(assignment), timeout_s=None)


class TellsTheEndTooEarly(Faulty):
    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        self.report(Ended([(name, 0, "end")]))


class StartsLater(Faulty):
    """Its starts are tasks, and an end that comes before the first step of such a task is lost."""

    _task: asyncio.Task[None] | None = None

    def start(self, assignments: list[Assignment]) -> None:
        async def later() -> None:
            self._task = None
            super(StartsLater, self).start(assignments)

        self._task = asyncio.get_running_loop().create_task(later())

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        if self._task is not None:
            self._task.cancel()
        super().end(name, grace_s, why)


class AsksTooLate(Faulty):
    """What it reports while it opens is lost."""

    _opens = False

    async def open(self) -> list[Living]:
        living = await super().open()
        self._opens = True
        await asyncio.sleep(0)
        self._opens = False
        return living

    def tell(self, report: ReportEvent, event: DriverEvent) -> None:
        if not self._opens:
            report(event)


class ForgetsItsAttempts(Faulty):
    async def open(self) -> list[Living]:
        await super().open()
        return []


class GivesItsOwnVariables(Faulty):
    def variables(self, environment: dict[str, str]) -> dict[str, str]:
        return dict(os.environ) | environment


class ShowsAnyDevice(Faulty):
    def variables(self, environment: dict[str, str]) -> dict[str, str]:
        return environment | {"CUDA_VISIBLE_DEVICES": "1,3"}


class KeepsSecretsToItself(Faulty):
    def variables(self, environment: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in environment.items() if name != "TOKEN"}


class KnowsNoRank(Faulty):
    def variables(self, environment: dict[str, str]) -> dict[str, str]:
        return environment | ({"RANK": "0"} if "RANK" in environment else {})


class NeverFences(Faulty):
    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        pass


class GivesNoNotice(Faulty):
    def end_with_notice(self, name: AttemptName, grace_s: float, why: str, notice_s: float) -> None:
        self.end(name, grace_s, why)


class KnowsNoAttempt(Faulty):
    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        return {}


class Nothing(Execution):
    """A command that is none: it ends at once, and well."""

    async def run(self, take: Take) -> int:
        return 0

    async def write(self, data: bytes) -> None:
        pass

    def resize(self, size: Terminal) -> None:
        pass

    def signal(self, name: str) -> None:
        pass

    async def close(self) -> None:
        pass


class RunsNoCommand(Faulty):
    async def execute(self, request: Request, asked: Exec, size: Terminal) -> Execution:
        return Nothing()


class BelievesTheMainProcess(Driver):
    """It takes the end of a job's first process for the end of the job."""

    name = "believes"

    def __init__(self) -> None:
        super().__init__()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, assignments: list[Assignment]) -> None:
        for each in assignments:
            self._tasks.add(asyncio.get_running_loop().create_task(self._run_one(each)))

    async def _run_one(self, each: Assignment) -> None:
        process = await asyncio.create_subprocess_exec(*each.run.argv)
        self.report(Started([each.name]))
        self.report(Ended([(each.name, await process.wait(), "exit")]))

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        pass


class MakesNoTerminal(Faulty):
    def _start_attempt(self, assignment: Assignment) -> StartAttempt:
        return msgspec.structs.replace(super()._start_attempt(assignment), terminal=False)


FAULTS: Final = {
    "proof": BelievesTheMainProcess,
    "notice": GivesNoNotice,
    "attempts_of": KnowsNoAttempt,
    "fence": NeverFences,
    "start": TellsNoStart,
    "exit_code": LosesTheCode,
    "output": SaysNothing,
    "cancel": CallsAnyEndAnExit,
    "grace": GivesNoGrace,
    "timeout": KnowsNoTimeout,
    "children": TellsTheEndTooEarly,
    "agent_killed": ForgetsItsAttempts,
    "end_during_open": AsksTooLate,
    "end_at_once": StartsLater,
    "environment": GivesItsOwnVariables,
    "devices": ShowsAnyDevice,
    "secrets": KeepsSecretsToItself,
    "gang": KnowsNoRank,
    "exec": RunsNoCommand,
    "terminal": MakesNoTerminal,
}


class Suspects(Processes):
    """The checks of a driver with a fault."""


#: what fails because something does not happen: the others must not fail because this machine is slow
WAITED_FOR: Final = ("attempts_of", "fence", "start", "output", "timeout", "end_during_open", "end_at_once")


def suspect(check: str) -> type[Suspects]:
    """Made as a name of this module, since an agent in a process of its own finds it there."""
    kind = FAULTS[check]
    fields = {"driver": f"{__name__}:{kind.__name__}", "slack_s": 5.0 if check in WAITED_FOR else 60.0}
    made = type(f"Of{kind.__name__}", (Suspects,), fields | {"__module__": __name__})
    globals()[made.__name__] = made
    return made


SUSPECTS: Final = {check: suspect(check) for check in FAULTS}


@pytest.mark.slow
@pytest.mark.parametrize("check", FAULTS)
def test_a_driver_with_a_fault_fails_the_check_for_it(check: str) -> None:
    checks = SUSPECTS[check]
    checks.setup_class()
    try:
        run: Callable[[], None] = getattr(checks(), f"test_{check}")
        with pytest.raises((AssertionError, TimeoutError)):  # one that is not over in time has failed, too
            run()
    finally:
        checks.teardown_class()


class TestOwn(Processes):
    """The driver of processes that stands in the how-to, as its author would check it."""

    driver = "commands:Commands"
    dashes = TestProcess.dashes
    folder: ClassVar[tempfile.TemporaryDirectory[str]]

    @classmethod
    def setup_class(cls) -> None:
        """Write the how-to's file where agents find it, too."""
        super().setup_class()
        cls.folder = tempfile.TemporaryDirectory(prefix="moorage-own-")
        [block] = [
            each for each in page(DOCS / "how-to" / "write-your-own-driver.md").blocks if each.title == "commands.py"
        ]
        Path(cls.folder.name, "commands.py").write_text(block.body)
        sys.path.insert(0, cls.folder.name)

    @classmethod
    def teardown_class(cls) -> None:
        sys.path.remove(cls.folder.name)
        sys.modules.pop("commands", None)
        cls.folder.cleanup()
        super().teardown_class()


def test_the_checks_run_on_the_loop_that_a_worker_runs_on() -> None:
    """Uvloop refuses what the loop of asyncio takes: a driver that passed on the other could start no job."""
    seen: list[asyncio.AbstractEventLoop] = []

    async def check(_: Bench) -> None:
        seen.append(asyncio.get_running_loop())

    checks = type("OfLoop", (Suspects,), {"driver": f"{__name__}:Faulty"})
    assert issubclass(checks, Suspects)
    checks.setup_class()
    try:
        checks()._on_bench(check)
    finally:
        checks.teardown_class()
    assert isinstance(seen[0], uvloop.Loop)


class RefusesAll(Faulty):
    def check(self, request: Request) -> None:
        raise refuse("invalid-argument", "nothing runs here")


def test_a_check_whose_job_is_refused_fails_at_once_and_says_why() -> None:
    checks = type("OfRefusesAll", (Suspects,), {"driver": f"{__name__}:RefusesAll", "slack_s": 3600.0})
    assert issubclass(checks, Suspects)
    checks.setup_class()
    try:
        with pytest.raises(AssertionError, match=r"exited of .* cannot come: refused 0, .*nothing runs here"):
            checks().test_start()
    finally:
        checks.teardown_class()


def test_a_pipe_that_is_left_open_fails_the_check_and_does_not_hang_it() -> None:
    reads, writes = os.pipe()
    left: list[asyncio.Task[bytes]] = []

    async def check(_: Bench) -> None:
        left.append(asyncio.create_task(asyncio.to_thread(os.read, reads, 1)))
        await asyncio.sleep(0)

    checks = type("OfOpenPipe", (Suspects,), {"driver": f"{__name__}:Faulty", "slack_s": 5.0})
    assert issubclass(checks, Suspects)
    checks.setup_class()
    try:
        with pytest.raises(AssertionError, match="left a pipe, a socket, a process or a thread open"):
            checks()._on_bench(check)
    finally:
        os.close(writes)  # lets the thread go: Python waits for it before it exits
        checks.teardown_class()
