"""GPUs for code that already runs: a lease from the worker of this host, over its UNIX socket, without the scheduler.

    async with moorage.lease("1xL40S", purpose="fine-tune") as lease:
        model.to(lease.device)
        ...
        if lease.asked_back:  # the worker leaves, or an operator asks: the reason and so many seconds
            save_checkpoint(within_s=lease.asked_back.left_s)

The lease is held as long as the block runs and this process lives, and waits in one queue with what the fleet places
here. The devices go to the next user once their memory is free. CUDA keeps a context on a device for as long as its
process lives, so do GPU work in a child process, with `lease.environment`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from moorage.bus.target import WORKERS_FOLDER, home
from moorage.client.errors import NoAgent, NotPermitted, TimedOut, client_problem, error_of, rejected
from moorage.client.values import Duration, gpu_spec, seconds
from moorage.schemas.gpu import GpuSpec, format_token
from moorage.worker.leases.client import AskedBack, BorrowedLease, LeaseRefused, borrow
from moorage.worker.leases.protocol import SOCKET_NAME

if TYPE_CHECKING:
    from moorage.schemas.frames import Device
    from moorage.schemas.gpu import Sharing

SOCKET_VARIABLE: Final = "MOORAGE_LEASE_SOCKET"
#: where a worker that the system runs has its socket
SYSTEM_SOCKET: Final = Path("/run/moorage") / SOCKET_NAME
_NOT_PERMITTED: Final = (errno.EACCES, errno.EPERM)

OnAskedBack = Callable[[AskedBack], None]


class Lease:
    """Devices of this host, for nobody else until given back, or shared in their `mode`. Made by `AsyncClient.lease`.

    `worker` is the worker that lends them; `simulated` says that they are not real. `environment` holds the variables
    that show a process exactly these devices (`CUDA_VISIBLE_DEVICES` and its kin); give them to processes that you
    start.
    """

    def __init__(self, borrowed: BorrowedLease) -> None:
        self._borrowed = borrowed
        self.worker: Final = borrowed.worker
        self.devices: Final[tuple[Device, ...]] = borrowed.devices
        self.uuids: Final = borrowed.uuids
        self.mode: Final[Sharing] = borrowed.mode
        self.simulated: Final = borrowed.simulated
        self.environment: Final[Mapping[str, str]] = borrowed.environment

    def __repr__(self) -> str:
        return repr(self._borrowed).replace("<BorrowedLease", "<Lease", 1)

    @property
    def device(self) -> str:
        """The first device as PyTorch names it in this process: `cuda:3`, or `xpu:0`.

        The index counts in `CUDA_VISIBLE_DEVICES` if this process has that variable, else in the order of the PCI bus,
        which is CUDA's own under `CUDA_DEVICE_ORDER=PCI_BUS_ID`. Raises `Rejected` if the variable hides the device.
        """
        return torch_device(self.devices[0], os.environ)

    @property
    def asked_back(self) -> AskedBack | None:
        """Why and until when to give back; None while nobody asks for it. After a loss the reason is `agent-gone`."""
        return self._borrowed.asked_back

    @property
    def lost(self) -> bool:
        """Whether the agent is gone, and the lease with it: others may then get the devices."""
        return self._borrowed.lost

    async def wait_asked_back(self, timeout: Duration | None = None) -> AskedBack:
        """Wait until the lease is asked back or lost, without `timeout` for as long as it takes.

        Raises `TimedOut`.
        """
        timeout_s = None if timeout is None else seconds(timeout)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._borrowed.wait_asked_back()
        except TimeoutError:
            raise TimedOut(
                client_problem("timed-out", f"the lease was not asked back within {timeout_s or 0:g} s")
            ) from None

    async def give_back(self) -> None:
        """Give the devices back before the block ends. Does nothing if they were given back or lost before."""
        await self._borrowed.give_back()


def torch_device(device: Device, environment: Mapping[str, str]) -> str:
    """See `Lease.device`. Raises `Rejected`."""
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
        next="start without CUDA_VISIBLE_DEVICES, or do the work in a child process with lease.environment",
    )


def find_sockets(socket: Path | str | None, env: Mapping[str, str] | None = None) -> list[Path]:
    """Where a worker of this host may lend: the path given, else $MOORAGE_LEASE_SOCKET, else the workers of the
    `moorage up` of this folder and the one that the system runs."""
    env = os.environ if env is None else env
    if named := socket or env.get(SOCKET_VARIABLE):
        return [Path(named)]
    return [*sorted(home(env=env).glob(f"{WORKERS_FOLDER}/*/{SOCKET_NAME}")), SYSTEM_SOCKET]


@contextlib.asynccontextmanager
async def lend(
    gpu: GpuSpec | str | int,
    purpose: str,
    timeout_s: float,
    socket: Path | str | None,
    on_asked_back: OnAskedBack | None,
) -> AsyncIterator[Lease]:
    """See `AsyncClient.lease`."""
    replicas, spec = gpu_spec(gpu)
    if replicas != 1:
        raise rejected(
            "invalid-argument",
            f"a lease is of one host: {replicas} replicas are of a job",
            field="$.gpu",
            found=str(gpu),
            next=f"ask for {format_token(msgspec.structs.replace(spec, count=spec.count * replicas))}",
        )
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(timeout_s) as waiting:
                borrowed = await _borrowed(stack, find_sockets(socket), spec, purpose, on_asked_back)
        except TimeoutError:
            if not waiting.expired():
                raise
            raise TimedOut(
                client_problem(
                    "timed-out",
                    f"no {format_token(spec)} came free on this host within {timeout_s:g} s",
                    next_step="moorage fleet shows what is free where",
                )
            ) from None
        yield Lease(borrowed)


async def _borrowed(
    stack: contextlib.AsyncExitStack,
    sockets: list[Path],
    spec: GpuSpec,
    purpose: str,
    on_asked_back: OnAskedBack | None,
) -> BorrowedLease:
    """From the first worker that can lend it. Raises `ClientError` of the last one that answered, else `NoAgent`."""
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
    raise NoAgent(
        client_problem("no-agent", f"no worker of this host lends GPUs: looked at {looked}", found=looked),
        ("start one on this host: moorage worker", f"or name its socket: {SOCKET_VARIABLE}=<its state>/{SOCKET_NAME}"),
    )
