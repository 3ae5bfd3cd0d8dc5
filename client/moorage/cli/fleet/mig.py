"""`moorage admin mig`: divide a GPU of this host into other MIG slices, with its worker drained meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from moorage.cli.fleet.workers import worker_of
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.options import DEFAULTS, Options, with_client
from moorage.cli.framework.render import age
from moorage.client.durations import seconds
from moorage.client.errors import rejected
from moorage.schemas.answers.fleet import DeviceRow, WorkerInfo
from moorage.schemas.cells import FOREIGN, FROZEN, LEASED
from moorage.schemas.frames.fleet import names_of
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.worker.devices.readers.mig_layout import MigGpu

T = TypeVar("T")

#: between two questions whether the worker is empty, or lists the slices
ASK_S: Final = 0.5
#: how long the worker has to list what was made
LISTED_S: Final = 120.0
#: how long NVML has to divide a GPU
NVML_S: Final = 120.0
#: how long NVIDIA's program has to make a CDI spec
SPEC_S: Final = 60.0
FOR_DEFAULT: Final = "1h"


def mig(
    worker: Annotated[
        str, Parameter(help="The worker of this host, as moorage fleet shows it.", lists="fleet --format {worker}")
    ],
    gpu: Annotated[str, Parameter(help="The GPU: its index in nvidia-smi, its uuid, or its PCI address.")],
    layout: Annotated[str, Parameter(help="Profiles with counts, as 3g.40gb,4x1g.10gb; off for a whole GPU.")],
    /,
    *,
    at_most: Annotated[
        str, Parameter(help="Give up if jobs still run there after so long; the GPU is left alone.", value="DURATION")
    ] = FOR_DEFAULT,
    options: Options = DEFAULTS,
) -> int:
    """Divide a GPU of this host into other MIG slices.

    Run it as root on the worker's host. It drains the worker, waits until the last job and lease there has ended,
    destroys the slices of that GPU, makes the new ones, and has nvidia-ctk make the host's CDI spec anew, if there is
    one. It waits until the worker lists the slices, and opens the worker again if it was open before, also when it
    gives up after --at-most or by Ctrl-C while it waits for jobs.
    A layout that does not fit leaves the former slices. If this fails later or is killed, the worker stays drained:
    the same command once more makes what is missing, and moorage uncordon opens the worker.
    """

    async def work(client: AsyncClient) -> None:
        from moorage.worker.devices.readers.mig_layout import parse_layout

        wanted, limit_s = parse_layout(layout), seconds(at_most)
        row = await _row(client, worker)
        found, uuid, pci = await _opened(gpu, row)
        await _in_time(lambda: found.check(wanted))
        was_open = row.flag == "open"
        if row.flag != "draining":
            await client.fleet.drain(worker, why=f"MIG layout of GPU {gpu}: {layout}")
        try:
            await _emptied(client, worker, limit_s)
        except BaseException:
            if was_open:
                await client.fleet.uncordon(worker)
                print_err(f"worker {worker} is open for jobs again, and its GPU is as it was")
            raise
        try:
            changed = await _in_time(lambda: found.change(wanted))
            if changed and (told := await _specs_made_anew()):
                print_err(told)
            slices = await _listed(client, worker, (uuid, pci), sorted(wanted))
        except BaseException:
            print_err(f"worker {worker} stays drained; moorage uncordon {worker} opens it for jobs again")
            raise
        if was_open:
            await client.fleet.uncordon(worker)
        if options.json:
            rows = [{"profile": each.profile, "uuid": each.uuid} for each in slices]
            emit({"kind": "mig", "worker": worker, "gpu": uuid, "changed": changed, "slices": rows})
            return
        done = "has this MIG layout already" if not changed else many(len(slices), "slice") if slices else "whole"
        print_out(f"{worker}\tGPU {gpu}\t{done}" + "".join(f"\n{each.profile}\t{each.uuid}" for each in slices))
        if not was_open:
            print_err(
                f"worker {worker} was drained or cordoned before this command, so it was not opened again: "
                f"moorage uncordon {worker} opens it for jobs"
            )

    return with_client(options, work)


async def _specs_made_anew() -> str:
    """Have NVIDIA's program make the CDI spec of this host anew, which lacks the new slices, if there is a spec.

    Return a line to show: what was done, or what is left to do; "" without a spec.
    """
    from moorage.system.daemon_threads import in_thread
    from moorage.worker.devices.readers.cdi import KINDS, folders, read_registry, spec_files
    from moorage.worker.devices.readers.cdi_devices import MAKES_SPEC, spec_of

    where, kind = folders(), KINDS["nvidia"]
    if not (await in_thread("cdi", lambda: read_registry(where))).names(kind):
        return ""
    file = spec_of([path for folder in where for path in spec_files(folder)], kind)
    lacks = f"containers by CDI do not find the new devices before it is made anew: {MAKES_SPEC}{file}"
    words = f"{MAKES_SPEC}{file}".split()
    if (program := shutil.which(words[0])) is None:
        return f"warning[cdi]: {words[0]} is not on the PATH, and {file} is older than the devices; {lacks}"
    made = await asyncio.create_subprocess_exec(
        program, *words[1:], stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(SPEC_S):
            _, said = await made.communicate()
    except TimeoutError:
        made.kill()
        await made.wait()
        return f"warning[cdi]: {words[0]} did not end within {SPEC_S:g} s; {lacks}"
    if made.returncode:
        why = said.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {made.returncode}"]
        return f"warning[cdi]: {words[0]} failed: {why[0]}; {lacks}"
    return f"the CDI spec {file} is made anew"


async def _row(client: AsyncClient, worker: str) -> WorkerInfo:
    """Return what `fleet` says of a worker. Raises `NotFound`, and Rejected with failed-precondition if it is
    simulated."""
    _, row = await worker_of(client, worker)
    if row.simulated:
        raise rejected("failed-precondition", "the GPUs of a simulated worker cannot be divided", found=worker)
    return row


async def _opened(gpu: str, row: WorkerInfo) -> tuple[MigGpu, str, str]:
    """Return the GPU of this host with that index, uuid or address, and its uuid and address. Raises Rejected if there
    is none, if NVML does not work, or if the worker does not lend it."""

    def look() -> tuple[MigGpu, str, str]:
        import pynvml

        from moorage.worker.devices.readers.mig_layout import MigGpu

        try:
            pynvml.nvmlInit()
            every = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
            known = [(pynvml.nvmlDeviceGetUUID(raw), pynvml.nvmlDeviceGetPciInfo(raw).busId) for raw in every]
        except pynvml.NVMLError as error:
            raise rejected("failed-precondition", f"NVML does not work on this host: {error}") from None
        for at, (uuid, pci) in enumerate(known):
            if gpu.lower() in (str(at), uuid.lower(), *names_of(uuid, pci, ())):
                if all(uuid != device.uuid and pci != device.pci for device in row.devices or ()):
                    why = f"the worker does not offer GPU {gpu} of this host"
                    raise rejected("failed-precondition", why, found=row.worker, next="run this on the worker's host")
                return MigGpu(pynvml, every[at]), uuid, str(pci)
        raise rejected("not-found", "this host has no such GPU", found=gpu, next="nvidia-smi -L lists them")

    return await _in_time(look)


async def _in_time(work: Callable[[], T]) -> T:
    """Return what `work` returns. Raises Rejected if it takes more than NVML_S: a call to NVML may hang in the
    kernel."""
    from moorage.system.daemon_threads import in_thread

    try:
        async with asyncio.timeout(NVML_S):
            return await in_thread("nvml-mig", work)
    except TimeoutError:
        raise rejected("failed-precondition", f"NVML did not answer within {NVML_S:g} s") from None


async def _emptied(client: AsyncClient, worker: str, limit_s: float) -> None:
    """Wait until nothing runs on the worker and none of its devices is lent. Raises Rejected after the limit."""
    ends_s, told = time.monotonic() + limit_s, ""
    while True:
        row = await _row(client, worker)
        used = sum(cell in (LEASED, FROZEN, FOREIGN) or cell.isdigit() for cell in row.cells)
        if row.flag == "draining" and not row.members and not used:
            return
        if time.monotonic() >= ends_s:
            why = f"the worker still has jobs or used GPUs after {age(int(limit_s * 1000))}"
            raise rejected("failed-precondition", why, found=row.cells, next=f"moorage fleet {worker} shows them")
        words = f"waiting for {many(row.members, 'job')} and {many(used, 'GPU')} in use on {worker}"
        if words != told:
            print_err(words)
        told = words
        await asyncio.sleep(ASK_S)


async def _listed(client: AsyncClient, worker: str, gpu: tuple[str, str], wanted: list[str]) -> list[DeviceRow]:
    """Wait until the worker lists these slices, or the whole GPU; `gpu` is its uuid and address. Raises Rejected."""
    ends_s = time.monotonic() + LISTED_S
    while time.monotonic() < ends_s:
        row = await _row(client, worker)
        slices = [device for device in row.devices or () if device.profile and device.pci == gpu[1]]
        is_whole = any(device.uuid == gpu[0] and not device.mig for device in row.devices or ())
        is_so = sorted(device.profile for device in slices) == wanted and is_whole == (not wanted)
        if row.state != "lost" and is_so:
            return slices
        await asyncio.sleep(ASK_S)
    why = f"the worker does not list the new slices after {LISTED_S:g} s"
    raise rejected("failed-precondition", why, found=worker, next="start the worker again, and look at its log")
