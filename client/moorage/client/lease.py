"""GPUs for code that already runs: a lease from the worker of this host, over its UNIX socket, without the scheduler.

    async with moorage.lease("1xL40S", purpose="fine-tune") as lease:
        model.to(lease.device)
        ...
        if lease.asked_back:  # the worker wants the devices back: it has the reason and the seconds left
            save_checkpoint(within_s=lease.asked_back.left_s)

    lease = await moorage.lease("1xL40S")  # in a notebook, where a block cannot span cells
    ...
    await lease.give_back()

The lease lasts while the block runs, or while the `Lease` is referenced, and at most as long as this process. The
request waits in one queue with the jobs that the scheduler places on this host. The worker passes a device on only once
its memory is free. CUDA keeps a context on a device as long as the process lives, so do GPU work in a child process,
with `lease.child_environment()`.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.bus.lend.client import AskedBack, BorrowedLease, LeaseRefused, borrow
from moorage.bus.lend.protocol import SOCKET_NAME
from moorage.bus.target import WORKERS_FOLDER, find_home, read_up
from moorage.client.durations import Duration, seconds
from moorage.client.errors import NoAgent, NotPermitted, client_problem, error_of, rejected, timed_out
from moorage.client.gpus import gpu_spec
from moorage.schemas.gpu import GpuSpec, as_one_replica, format_token
from moorage.system.device_environment import child_environment

if TYPE_CHECKING:
    from moorage.schemas.frames import Device
    from moorage.schemas.gpu import Sharing

SOCKET_VARIABLE: Final = "MOORAGE_LEASE_SOCKET"
#: the socket of a worker that runs as a system service
SYSTEM_SOCKET: Final = Path("/run/moorage") / SOCKET_NAME
#: a command that starts a worker which lends. Beside a `moorage up` with several simulated hosts one is needed: those
#: hosts lend nothing, as the processes of this machine belong to none of them
_A_SIMULATED_LENDER: Final = "moorage worker --id lender --simulate 2xH100"
_NOT_PERMITTED: Final = (errno.EACCES, errno.EPERM)

OnAskedBack = Callable[[AskedBack], None]


class AsyncLease:
    """Devices of this host, leased until they are given back. Made by `AsyncClient.lease`.

    `mode` is the sharing mode. `worker` is the worker that lends the devices. `simulated` says that they are not real.
    `environment` has the variables that make exactly these devices visible to a process (`CUDA_VISIBLE_DEVICES` and
    similar ones). Start processes with `child_environment()`, which includes them.
    """

    def __init__(self, borrowed: BorrowedLease, held: AsyncExitStack) -> None:
        self._borrowed = borrowed
        self._held = held  # closing it gives the devices back; it lives as long as this lease, not as its `Lending`
        self.worker: Final = borrowed.worker
        self.devices: Final[tuple[Device, ...]] = borrowed.devices
        self.uuids: Final = borrowed.uuids
        self.mode: Final[Sharing] = borrowed.mode
        self.simulated: Final = borrowed.simulated
        self.environment: Final[Mapping[str, str]] = borrowed.environment

    def __repr__(self) -> str:
        return repr(self._borrowed).replace("<BorrowedLease", "<AsyncLease", 1)

    def child_environment(self) -> dict[str, str]:
        """Return the whole environment (`env`) for a child process that uses the devices.

        It is this process's environment, updated with `environment`: the child sees these devices and no others. PATH,
        LD_PRELOAD and LD_LIBRARY_PATH are extended by `TF_PATH` and similar variables, as in jobs.
        """
        return child_environment(os.environ, self.environment)

    @property
    def device(self) -> str:
        """The first device as PyTorch names it in this process: `cuda:3`, or `xpu:0`.

        The index is the position in `CUDA_VISIBLE_DEVICES`, if this process has that variable. Otherwise it is the
        position on the PCI bus; for CUDA to count like this, set `CUDA_DEVICE_ORDER=PCI_BUS_ID`. Raises `Rejected` if
        the variable hides the device.
        """
        return torch_device(self.devices[0], os.environ)

    @property
    def asked_back(self) -> AskedBack | None:
        """Why and until when the worker asks for the devices; None if it does not. After a loss the reason is
        `agent-gone`."""
        return self._borrowed.asked_back

    @property
    def lost(self) -> bool:
        """Whether the agent has stopped and the lease has ended with it. Other jobs may then get the devices."""
        return self._borrowed.lost

    async def wait_asked_back(self, timeout: Duration | None = None) -> AskedBack:
        """Wait until the worker asks for the devices or the lease is lost, and return `asked_back`.

        Without `timeout` there is no time limit. If this process gives the devices back first, the reason is
        `given-back`. Raises `TimedOut`.
        """
        timeout_s = None if timeout is None else seconds(timeout)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._borrowed.wait_asked_back()
        except TimeoutError:
            raise timed_out(f"the lease was not asked back within {timeout_s or 0:g} s") from None

    async def give_back(self) -> None:
        """Give the devices back; in a block, before it ends. Does nothing if they were given back or lost before."""
        await self._held.aclose()


def torch_device(device: Device, environment: Mapping[str, str]) -> str:
    """Return `Lease.device` of this device in a process with this environment. Raises `Rejected`."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if device.vendor == "intel" or visible is None:
        return f"{'xpu' if device.vendor == 'intel' else 'cuda'}:{device.index}"
    names = [name.strip() for name in visible.split(",")]
    for position, name in enumerate(names):
        if name == str(device.index) or (name and device.uuid.startswith(name)):
            return f"cuda:{position}"
    raise rejected(
        "failed-precondition",
        f"this process cannot see {device.uuid}, which the worker lent",
        found=f"CUDA_VISIBLE_DEVICES={visible}",
        next="start without CUDA_VISIBLE_DEVICES, or do the work in a child process with lease.child_environment()",
    )


def find_sockets(socket: Path | str | None, env: Mapping[str, str] | None = None) -> list[Path]:
    """Return the sockets of workers that may lend: the path given, else $MOORAGE_LEASE_SOCKET, else the sockets of the
    workers of the `moorage up` of this folder, followed by the system service's. None of them need exist."""
    env = os.environ if env is None else env
    if named := socket or env.get(SOCKET_VARIABLE):
        return [Path(named)]
    return [*sorted(find_home(env).glob(f"{WORKERS_FOLDER}/*/{SOCKET_NAME}")), SYSTEM_SOCKET]


class Lending(AbstractAsyncContextManager[AsyncLease], Awaitable[AsyncLease]):
    """A lease to be taken, made by `AsyncClient.lease`: `async with` takes it for a block, `await` until
    `Lease.give_back`."""

    def __init__(
        self,
        gpu: GpuSpec | str | int,
        purpose: str,
        timeout_s: float,
        socket: Path | str | None,
        on_asked_back: OnAskedBack | None,
    ) -> None:
        self._gpu = gpu
        self._purpose = purpose
        self._timeout_s = timeout_s
        self._socket = socket
        self._on_asked_back = on_asked_back
        self._held = AsyncExitStack()

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> AsyncLease:
        spec = _spec_of_one(self._gpu)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._timeout_s) as waiting:
                    borrowed = await _borrowed(
                        stack, find_sockets(self._socket), spec, self._purpose, self._on_asked_back
                    )
            except TimeoutError:
                if not waiting.expired():
                    raise
                raise timed_out(
                    f"no {format_token(spec)} came free on this host within {self._timeout_s:g} s",
                    next_step="wait longer, or submit it as a job, which may start on another host",
                ) from None
            self._held = stack.pop_all()
        return AsyncLease(borrowed, self._held)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._held.__aexit__(kind, error, at)


def _spec_of_one(gpu: GpuSpec | str | int) -> GpuSpec:
    """Return the GPUs that are asked for. Raises `Rejected` for an invalid request, and for more than one replica."""
    replicas, spec = gpu_spec(gpu)
    if replicas == 1:
        return spec
    raise rejected(
        "invalid-argument",
        f"a lease is for one host and has no replicas, but {replicas} replicas are asked for",
        field="$.gpu",
        found=str(gpu),
        next=f"ask for {as_one_replica(spec, replicas)}",
    )


async def _borrowed(
    stack: AsyncExitStack,
    sockets: list[Path],
    spec: GpuSpec,
    purpose: str,
    on_asked_back: OnAskedBack | None,
) -> BorrowedLease:
    """Borrow from the first worker that can lend. Raises the `ClientError` of the last one that refused, or whose
    socket may not be opened (`NotPermitted`); `NoAgent` if there is no such worker."""
    refused: LeaseRefused | None = None
    for path in sockets:
        try:
            return await stack.enter_async_context(borrow(path, spec, purpose=purpose, on_asked_back=on_asked_back))
        except LeaseRefused as error:
            if refused is None or not error.errno or error.errno in _NOT_PERMITTED:
                refused = error
    assert refused is not None
    if refused.code == "not-permitted" or refused.errno in _NOT_PERMITTED:
        problem = msgspec.structs.replace(refused.problem, code="not-permitted")
        raise NotPermitted(problem)
    if not refused.errno:
        raise error_of(refused.problem)
    looked = ", ".join(str(path) for path in sockets)
    simulates = up.simulate if (up := read_up(find_home())) is not None else ""
    raise NoAgent(
        client_problem("no-agent", f"no worker of this host lends GPUs: {_why_none(simulates)}looked at {looked}"),
        (
            f"start one on this host: {_A_SIMULATED_LENDER if simulates else 'moorage worker'}",
            f"or name its socket: {SOCKET_VARIABLE}=<its state>/{SOCKET_NAME}",
        ),
    )


def _why_none(simulates: str) -> str:
    """Return why the `moorage up` of this folder lends nothing, if it simulates several hosts; else ""."""
    if not simulates:
        return ""
    from moorage.system.simulated_hosts import named_hosts

    try:
        hosts = named_hosts(simulates)
    except (OSError, ValueError):
        return ""
    if len(hosts) < 2:
        return ""
    return f"the moorage up of this folder simulates {len(hosts)} hosts, and only a worker of one host lends; "
