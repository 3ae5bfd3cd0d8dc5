"""What a real GPU shows, one check after another; each returns a line of what it saw, with its numbers."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.client.job import AsyncJob
from moorage.schemas.answers.operators import Drift
from moorage.schemas.gpu import GpuSpec
from moorage.system.device_environment import MPS_LOG_DIRECTORY, MPS_PIPE_DIRECTORY
from moorage.worker.devices.device_health import DeviceHealth
from moorage.worker.devices.readers.machine import CombinedInventory, open_machine
from moorage.worker.devices.readers.nvml import open_nvml
from moorage.worker.devices.readers.nvml_events import WAIT_MS
from moorage.worker.freezing.room import room_fault
from tests.release.gpu.nvidia_smi import NoGpu, fields_of
from tests.release.gpu.rig import HOLD, TRAIN, Failed, Rig, Skipped, mps_daemon, part

MIB: Final = 1024**2
#: of a job that shares a GPU
SHARE_MIB: Final = 2048
HELD_MIB: Final = 1024
#: how far NVML and nvidia-smi may be apart: they are asked one after the other
NEAR_MIB: Final = 64
#: what one process has on a device without allocating: its context
CONTEXT_MIB_MAX: Final = 900
#: of a job that is frozen whole, as a server of a large model is
LARGE_MIB: Final = 32 * 1024
#: how long an order to freeze or resume may take
ORDER_S: Final = 140.0
#: of a training job with PyTorch that shares a GPU
TRAIN_MIB: Final = 8192
TRAIN_S: Final = 8.0
#: of the steps of one job alone, what two make by mps
PAIR_MIN: Final = 1.3
#: of a kernel in which a client is ended; and the time limit that ends it, from its start
SPIN_S: Final = 30.0
SPIN_LIMIT_S: Final = 12.0
MACHINE: Final = "0" * 32
HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def expect(what: str, found: object, wanted: object) -> None:
    """Raise Failed unless this was found."""
    if found != wanted:
        raise Failed(f"{what}: found {found}, expected {wanted}")


async def inventory(rig: Rig) -> str:
    asked = fields_of("index,uuid,name,memory.total,pci.bus_id")
    found = await open_nvml()
    try:
        whole = [device for device in found.devices() if not device.profile]
        told = [[str(each.index), each.uuid, each.name, str(each.memory_mib), each.pci] for each in whole]
        expect("index, uuid, name, MiB and PCI address of each GPU", told, asked)
        faults = [fault.detail for reading in await found.sample() for fault in reading.faults]
    finally:
        found.close()
    return f"{len(told)} GPUs as nvidia-smi lists them; faults: {'; '.join(faults) or 'none'}"


async def idle_memory(rig: Rig) -> str:
    used = [int(mib) for [mib] in fields_of("memory.used")]
    found = await open_nvml()
    try:
        whole = [slot for slot, device in enumerate(found.devices()) if not device.profile]
        readings = await found.sample()
        idle = [at for at, slot in enumerate(whole) if not readings[slot].processes]
        for at in idle:
            apart_mib = abs(readings[whole[at]].memory_used_mib - used[at])
            if apart_mib > NEAR_MIB:
                raise Failed(f"NVML and nvidia-smi differ by {apart_mib} MiB of GPU {at}")
            expect(f"idle GPU {at} is free", await found.memory_is_free(whole[at]), True)
    finally:
        found.close()
    return f"{len(idle)} idle GPUs are free, and use what nvidia-smi shows, within {NEAR_MIB} MiB"


async def events(rig: Rig) -> str:
    """What well devices say; NVML is given back only once nobody waits for their events."""
    found = await open_nvml()
    heard: list[tuple[int, str]] = []
    try:
        found.watch(lambda slot, fault: heard.append((slot, fault.detail)))
        health = DeviceHealth(found.devices(), boot="b", now=0.0)
        for slot, reading in enumerate(await found.sample()):
            health.read(slot, reading, 0.0)
        expect("devices that are not well", health.unwell(0.0), [])
        await asyncio.sleep(2.5 * WAIT_MS / 1000)
    finally:
        found.close()
    await found.closed()
    expect("events of well devices", heard, [])
    return "all devices are well, none had an event in two waits, and NVML was given back after that"


async def two_gpus(rig: Rig) -> str:
    if (gpus := len(fields_of("uuid"))) < 2:
        raise Skipped("one GPU: two are needed")
    both = [await rig.start("hold", str(HELD_MIB)) for _ in range(2)]
    for job, file in both:
        await rig.wrote(job, file)
    leased = [uuid for job, _ in both for uuid in await rig.leased(job)]
    expect("GPUs of two jobs", len(set(leased)), 2)
    if gpus > 2:
        seen, rest = await rig.answer("see", gpu=GpuSpec(count=gpus - 2))
        await rig.ended(rest)
        expect("those among the GPUs of a third one", set(leased) & set(seen["uuids"]), set())
    for job, _ in both:
        await job.cancel()
        await rig.ended(job)
    return f"two jobs hold two of {gpus} GPUs"


async def next_waits(rig: Rig) -> str:
    machine = await open_machine(MACHINE)
    held_mib, count = min(device.memory_mib for device in machine.devices()) // 2, len(fields_of("uuid"))
    machine.close()
    job, file = await rig.start("below", str(held_mib), gpu=GpuSpec(count=count))
    await rig.wrote(job, file)
    other, at = await rig.start("see", gpu=GpuSpec(count=count))
    expect("the state of the job that waits for all GPUs", (await other.show()).state, "QUEUED")
    await job.cancel()
    used_mib = (await rig.wrote(other, at))["used_mib"]
    if len(used_mib) != count or max(used_mib) > CONTEXT_MIB_MAX:
        raise Failed(f"the next job began with {used_mib} MiB in use")
    return f"{held_mib} MiB were held of each first GPU; the next job began with {used_mib} MiB in use, its own context"


async def audit(rig: Rig) -> str:
    """An audit finds a process without a lease, and none that has one."""
    machine = await open_machine(MACHINE)
    uuid = machine.devices()[0].uuid
    machine.close()
    file = rig.folder / "foreign"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": uuid}
    foreign = await asyncio.create_subprocess_exec(
        sys.executable, "-IS", HOLD, "hold", str(file), str(HELD_MIB), env=environment
    )
    try:
        await rig.until("a process without a lease holds memory", lambda: _exists(file))
        [found] = await _audited(rig)
    finally:
        foreign.kill()
        await foreign.wait()
    expect("what the audit found", (found.kind, found.gpu, found.pid), ("nvml-foreign", uuid, foreign.pid))
    job, at = await rig.start("hold", str(HELD_MIB))
    await rig.wrote(job, at)
    await rig.until("nothing is found of a job with a lease", lambda: _is_sound(rig))
    await job.cancel()
    await rig.ended(job)
    return f"a process without a lease was found: {found.name}, {found.memory_mib} MiB; one with a lease was not"


async def _exists(file: Path) -> bool:
    return file.exists()


async def _audited(rig: Rig) -> list[Drift]:
    return [row for row in (await rig.client.fleet.audit()).drift if row.kind.startswith("nvml-")]


async def _is_sound(rig: Rig) -> bool:
    return not await _audited(rig)


async def inside(rig: Rig) -> str:
    seen, job = await rig.answer("see")
    expect("what CUDA lists in the job", seen["uuids"], await rig.leased(job))
    expect("MOORAGE_GPU_UUIDS", seen["MOORAGE_GPU_UUIDS"], seen["uuids"][0])
    nothing, _ = await rig.answer("see", gpu=None)
    expect("what CUDA lists in a job without GPUs", nothing["uuids"], [])
    return f"CUDA_VISIBLE_DEVICES={seen['CUDA_VISIBLE_DEVICES']} is the leased GPU, and a job without GPUs has none"


async def fence(rig: Rig) -> str:
    nodes = sorted(str(node) for node in Path("/dev").glob("nvidia[0-9]*"))
    [worker] = (await rig.client.fleet.show()).data["workers"]
    by = worker["capabilities"]["process"]["devices"]
    if by != "kernel" or not nodes:
        raise Skipped(f"the GPUs of a job are named by: {by}; files in /dev: {' '.join(nodes) or 'none'}")
    control = "/dev/nvidiactl"
    none, _ = await rig.answer("nodes", *nodes, control, gpu=None)
    expect("errors of a job without GPUs", set(none.values()), {errno.EPERM})
    one, _ = await rig.answer("nodes", *nodes, control)
    expect("files that a job with one GPU opens", sorted(one.values()).count(0), 2)
    expect("errors of the other GPUs", {code for code in one.values() if code}, {errno.EPERM} if nodes[1:] else set())
    return f"a job with one GPU opens its own file and {control}, of {len(nodes)} GPUs; one without any opens none"


async def free_again(rig: Rig) -> str:
    machine = await open_machine(MACHINE)
    try:
        job, file = await rig.start("below", str(HELD_MIB))
        await rig.wrote(job, file)
        slot = await _slot(rig, machine, await rig.leased(job))
        held = (await machine.sample())[slot].memory_used_mib
        if held < HELD_MIB:
            raise Failed(f"NVML says that {held} MiB are held where the job has taken {HELD_MIB}")
        cells = await rig.cells()
        await job.cancel()
        _, took_s = await rig.until("the GPU is free in the fleet", lambda: _is(rig.cells, cells, False))
        expect("memory back at its baseline", await machine.memory_is_free(slot), True)
        return f"{held} MiB held by a grandchild with a session of its own were free {took_s:.1f} s after the cancel"
    finally:
        machine.close()


async def _slot(rig: Rig, machine: CombinedInventory, leased: list[str]) -> int:
    return next(slot for slot, device in enumerate(machine.devices()) if device.uuid in leased)


async def _is(look: Callable[[], Awaitable[str]], text: str, same: bool) -> bool:
    return (await look() == text) is same


async def limiter(rig: Rig) -> str:
    told, _ = await rig.answer("limit", gpu=part("time-slice", SHARE_MIB))
    expect("total memory as the job is told", told["total"], SHARE_MIB * MIB)
    expect("an allocation of one byte more than is free", told["beyond"], 2)
    expect("an allocation of what is free", told["fits"], 0)
    expect("another piece after it", told["more"], 2)
    apart = (told["free_before"] - told["free_after"]) // MIB
    return (
        f"of {SHARE_MIB} MiB {told['free'] // MIB} are free and fit, a byte more is refused;"
        f" the first allocation took {apart} MiB of what was told as free"
    )


async def limiter_cost(rig: Rig) -> str:
    from bench.gpu import measured

    with_it, without = await measured(rig, rig.launches)
    more = {name: with_it[name] - without[name] for name in without}
    return "; ".join(f"{name}: {without[name]:.0f} ns without, {more[name]:+.0f} ns with it" for name in without)


async def guard(rig: Rig) -> str:
    job, file = await rig.start(
        "hold", str(2 * SHARE_MIB), gpu=part("time-slice", SHARE_MIB), before=("/usr/bin/env", "-u", "LD_PRELOAD")
    )
    await rig.wrote(job, file)
    began_s = asyncio.get_running_loop().time()
    result = await rig.ended(job)
    took_s = asyncio.get_running_loop().time() - began_s
    if not result.why.startswith("over-memory"):
        raise Failed(f"the job ended as {result.state}: {result.why}")
    return f"a process without the limiter was ended {took_s:.1f} s after it took {2 * SHARE_MIB} MiB: {result.why}"


async def guard_sharers(rig: Rig) -> str:
    """Three share one GPU; the one that takes more than its part is ended, and it alone."""
    share = part("time-slice", SHARE_MIB)
    others = [await rig.start("keep", str(HELD_MIB), gpu=share) for _ in range(2)]
    pids = [(await rig.wrote(job, file))["pid"] for job, file in others]
    seen = await guard(rig)
    for (job, file), pid in zip(others, pids, strict=True):
        expect("the memory of a sharer within its part", (await _look(rig, pid, job, file))["same"], True)
        await job.cancel()
    return f"{seen}; two sharers of that GPU, {HELD_MIB} MiB each, went on"


async def freeze(rig: Rig) -> str:
    return await _frozen(rig, HELD_MIB)


async def freeze_large(rig: Rig) -> str:
    machine = await open_machine(MACHINE)
    on_gpu = min(device.memory_mib for device in machine.devices())
    machine.close()
    if on_gpu < LARGE_MIB + HELD_MIB:
        raise Skipped(f"it needs {LARGE_MIB} MiB of a GPU, which has {on_gpu}")
    if fault := room_fault(os.getpid(), LARGE_MIB):
        raise Skipped(fault)
    return await _frozen(rig, LARGE_MIB)


async def _frozen(rig: Rig, mib: int) -> str:
    machine = await open_machine(MACHINE)
    try:
        job, file = await rig.start("keep", str(mib))
        pid = (await rig.wrote(job, file))["pid"]
        slot = await _slot(rig, machine, await rig.leased(job))
        held = (await machine.sample())[slot].memory_used_mib
        frozen_s = await _ordered(rig, rig.client.admin.freeze, job, "FROZEN")
        left = (await machine.sample())[slot].memory_used_mib
        resumed_s = await _ordered(rig, rig.client.admin.resume, job, "RUNNING")
        expect("its memory after it was resumed", (await _look(rig, pid, job, file))["same"], True)
        await job.cancel()
        speeds = [mib * MIB / 1e9 / seconds for seconds in (frozen_s, resumed_s)]
        times = f"in {frozen_s:.1f} s ({speeds[0]:.1f} GB/s), were back in {resumed_s:.1f} s ({speeds[1]:.1f} GB/s)"
        return f"{held} MiB became {left} MiB {times}, and the pattern is there; huge pages: {_huge_pages()}"
    finally:
        machine.close()


def _huge_pages() -> str:
    try:
        return HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "none"


async def _ordered(rig: Rig, order: Callable[[str], Awaitable[object]], job: AsyncJob, state: str) -> float:
    """Give an operator's order; return after how many seconds the job is in this state."""
    began_s = asyncio.get_running_loop().time()
    await order(job.job)
    await rig.until(f"the job is {state}", lambda: _state(rig, job.job, state), ORDER_S)
    return asyncio.get_running_loop().time() - began_s


async def _state(rig: Rig, job: str, wanted: str) -> bool:
    shown = await rig.client.job(job).show()
    refused = [change.why for change in shown.changes if change.state in ("NOT_FROZEN", "NOT_RESUMED")]
    if refused:
        raise Failed(f"{refused[-1]}")
    return shown.state == wanted


async def _look(rig: Rig, pid: int, job: AsyncJob, file: Path) -> Any:
    """Have a job look at what it holds; return what it wrote."""
    os.kill(pid, signal.SIGUSR1)
    looked, _ = await rig.until("it has looked at its memory", lambda: _looked(rig, job.job, file))
    return looked


async def _looked(rig: Rig, job: str, file: Path) -> object:
    answer = await rig.wrote(rig.client.job(job), file)
    return answer if answer["looks"] else None


async def mps(rig: Rig) -> str:
    [worker] = (await rig.client.fleet.show()).data["workers"]
    if "mps" not in worker["capabilities"]["process"]["enforced"]:
        raise Skipped("the worker does not offer mps: it needs nvidia-cuda-mps-control, and root")
    share = part("mps", SHARE_MIB)
    both = [await rig.start("keep", str(HELD_MIB), gpu=share) for _ in range(2)]
    for job, file in both:
        await rig.wrote(job, file)
    leased = [await rig.leased(job) for job, _ in both]
    told, _ = await rig.answer("limit", gpu=share)
    for job, _ in both:
        await job.cancel()
    for job, _ in both:
        await rig.ended(job)
    same = "on one GPU" if leased[0] == leased[1] else "on two GPUs"
    return (
        f"two sharers {same} at once; a third is told {told['total'] // MIB} MiB, and an allocation beyond what is free"
        f" answers {told['beyond']}"
    )


def _client_of(rig: Rig, memory_mib: int, compute_percent: int = 100) -> GpuSpec:
    """A part of a GPU under the operator's daemon."""
    return msgspec.structs.replace(part("mps", memory_mib, compute_percent), **rig.daemon)


async def operators_pair(rig: Rig) -> str:
    """MPS divides the compute, and the limiter keeps to memory: together both make more than one alone."""
    _with_torch()
    alone, job = await rig.answer("steps", str(TRAIN_S), gpu=_client_of(rig, TRAIN_MIB), program=TRAIN)
    await rig.ended(job)
    shares = (70, 30)
    asked = [_client_of(rig, TRAIN_MIB, percent) for percent in shares]
    both = [await rig.start("steps", str(2 * TRAIN_S), gpu=each, program=TRAIN) for each in asked]
    told = [await rig.wrote(job, file) for job, file in both]
    rates = [each["steps"] / (2 * TRAIN_S) / (alone["steps"] / TRAIN_S) for each in told]
    words = "; ".join(f"{share} % made {rate:.2f}" for share, rate in zip(shares, rates, strict=True))
    seen = f"of the steps of a job alone: {words}; together {sum(rates):.2f}"
    if sum(rates) < PAIR_MIN:
        raise Failed(f"{seen}, and at least {PAIR_MIN} are wanted")
    return seen


async def operators_ends(rig: Rig) -> str:
    """A client that is in a long kernel, and has no handler for SIGTERM, ends; its neighbour goes on."""
    _with_torch()
    seen = []
    for how in ("cancel", "time limit", "guard"):
        neighbour, at = await rig.start("keep", str(HELD_MIB), gpu=_client_of(rig, SHARE_MIB))
        pid = (await rig.wrote(neighbour, at))["pid"]
        mib = 2 * SHARE_MIB if how == "guard" else HELD_MIB
        before = ("/usr/bin/env", "-u", "LD_PRELOAD") if how == "guard" else ()
        limit: dict[str, Any] = {"limit": SPIN_LIMIT_S} if how == "time limit" else {}
        words = ("spin", str(SPIN_S), str(mib))
        job, file = await rig.start(*words, gpu=_client_of(rig, SHARE_MIB), program=TRAIN, before=before, **limit)
        await rig.wrote(job, file)
        began_s = asyncio.get_running_loop().time()
        if how == "cancel":
            await job.cancel()
        ended = await rig.ended(job)
        took_s = asyncio.get_running_loop().time() - began_s
        if "mps-not-asked" in ended.why:
            raise Failed(f"by {how}: {ended.why}")
        if took_s >= SPIN_S:
            raise Failed(f"by {how}: it ended {took_s:.1f} s after its kernel of {SPIN_S:g} s began")
        expect(f"the neighbour's memory after an end by {how}", (await _look(rig, pid, neighbour, at))["same"], True)
        await neighbour.cancel()
        await rig.ended(neighbour)
        seen.append(f"{how} ({ended.state}, {took_s:.1f} s)")
    return f"ended inside a kernel of {SPIN_S:g} s by {', by '.join(seen)}: each time the neighbour went on"


async def operators_use(rig: Rig) -> str:
    _with_torch()
    job, file = await rig.start("on", program=TRAIN, gpu=_client_of(rig, TRAIN_MIB))
    await rig.wrote(job, file)
    await asyncio.sleep(TRAIN_S)
    page = await job.use(last=TRAIN_S, points=4)
    await job.cancel()
    await rig.ended(job)
    [line] = page.devices
    if not any(line.percent):
        raise Failed(f"no use was told: {line}")
    return f"{line.percent} % of the device, shared by {line.shared_by}; {line.memory_mib} MiB of its own"


async def operators_exclusive(rig: Rig) -> str:
    """A job that has its GPU alone does not join a daemon in CUDA's default place, so it can be frozen."""
    pipe, log = Path(MPS_PIPE_DIRECTORY), Path(MPS_LOG_DIRECTORY)
    if "STUB_NVIDIA" in os.environ or pipe.exists() or log.exists():
        raise Skipped(f"it runs NVIDIA's daemon in {pipe} and {log}, which must not be there before")
    async with mps_daemon(pipe, log):
        try:
            return f"beside a daemon in {pipe}: {await _frozen(rig, HELD_MIB)}"
        finally:
            for folder in (pipe, log):
                shutil.rmtree(folder, ignore_errors=True)


async def idle(rig: Rig) -> str:
    return await _idle(rig, HOLD, "keep", str(HELD_MIB))


async def idle_training(rig: Rig) -> str:
    _with_torch()
    return await _idle(rig, TRAIN, "serve")


async def _idle(rig: Rig, program: str, *words: str) -> str:
    """A job that does not use its GPU is frozen; another one has the GPU, and leaves as the first one is used."""
    job, file = await rig.start(*words, program=program, qos="low")
    pid = (await rig.wrote(job, file))["pid"]
    _, frozen_s = await rig.until("the job is frozen for want of use", lambda: _state(rig, job.job, "FROZEN"))
    cells = await rig.cells()
    other, at = await rig.start("keep", str(HELD_MIB), preemptible=True)
    await rig.wrote(other, at)
    os.kill(pid, signal.SIGUSR1)
    looked, back_s = await rig.until("it was used again", lambda: _looked(rig, job.job, file))
    expect("what it holds is whole", looked["same"], True)
    expect("the state of the job that had its GPU", (await other.show()).state, "QUEUED")
    _, again_s = await rig.until("it is frozen again", lambda: _state(rig, job.job, "FROZEN"))
    for each in (job, other):
        await each.cancel()
        await rig.ended(each)
    return (
        f"frozen {frozen_s:.1f} s after its last use ({cells}); another job had the GPU;"
        f" used again it went on {back_s:.1f} s later, and was frozen again {again_s:.1f} s after that"
    )


def _with_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Skipped("PyTorch is not here")


async def torch_limit(rig: Rig) -> str:
    _with_torch()
    found = []
    for allocator in ("backend:native", "expandable_segments:True", "backend:cudaMallocAsync"):
        before = ("/usr/bin/env", f"PYTORCH_CUDA_ALLOC_CONF={allocator}")
        told, job = await rig.answer("fill", gpu=part("time-slice", TRAIN_MIB), before=before, program=TRAIN)
        ended = await rig.ended(job)
        expect(f"total memory as PyTorch is told, {allocator}", told["total"], TRAIN_MIB * MIB)
        expect(f"the end of a job that took all of its part, {allocator}", ended.state, "SUCCEEDED")
        if not told["error"] or told["held_mib"] > TRAIN_MIB:
            raise Failed(
                f"{told['held_mib']} MiB of {TRAIN_MIB} were given, {allocator}: {told['error'] or 'no error'}"
            )
        found.append(f"{told['held_mib']} with {allocator}")
    return f"of {TRAIN_MIB} MiB PyTorch got {', '.join(found)}; then OutOfMemoryError, and the job ended as it wanted"


async def training_cost(rig: Rig) -> str:
    _with_torch()
    found: list[list[float]] = [[], []]
    for _ in range(2):
        for at, before in enumerate(((), ("/usr/bin/env", "-u", "LD_PRELOAD"))):
            share = part("time-slice", 2 * TRAIN_MIB)
            told, job = await rig.answer("steps", str(TRAIN_S / 2), gpu=share, before=before, program=TRAIN)
            await rig.ended(job)
            found[at].append(told["ms"])
    with_it, without = (min(each) for each in found)
    return f"a step of training takes {without:.2f} ms without and {with_it:.2f} ms with it ({with_it / without:.3f} x)"


async def two_shares(rig: Rig) -> str:
    _with_torch()
    alone, job = await rig.answer("steps", str(TRAIN_S), gpu=part("time-slice", TRAIN_MIB), program=TRAIN)
    await rig.ended(job)
    shares = (70, 30)
    asked = [part("time-slice", TRAIN_MIB, percent) for percent in shares]
    both = [await rig.start("steps", str(2 * TRAIN_S), gpu=each, program=TRAIN) for each in asked]
    told = [await rig.wrote(job, file) for job, file in both]
    rates = [each["steps"] / (2 * TRAIN_S) / (alone["steps"] / TRAIN_S) for each in told]
    words = "; ".join(f"{share} % made {rate:.0%}" for share, rate in zip(shares, rates, strict=True))
    return f"of the steps of a job alone: {words}"


async def training_frozen(rig: Rig) -> str:
    _with_torch()
    job, file = await rig.start("on", program=TRAIN)
    pid = (await rig.wrote(job, file))["pid"]
    frozen_s = await _ordered(rig, rig.client.admin.freeze, job, "FROZEN")
    resumed_s = await _ordered(rig, rig.client.admin.resume, job, "RUNNING")
    looked = await _look(rig, pid, job, file)
    expect("its loss is a number", looked["same"], True)
    await job.cancel()
    await rig.ended(job)
    return (
        f"a training job froze in {frozen_s:.1f} s, came back in {resumed_s:.1f} s, and trained on to {looked['steps']}"
    )


async def use(rig: Rig) -> str:
    _with_torch()
    job, file = await rig.start("on", program=TRAIN)
    await rig.wrote(job, file)
    await asyncio.sleep(TRAIN_S)
    page = await job.use(last=TRAIN_S, points=4)
    await job.cancel()
    await rig.ended(job)
    expect("GPUs of the job whose use is told", len(page.devices), 1)
    [line] = page.devices
    if not line.percent or not any(line.percent):
        raise Failed(f"no use was told: {line}")
    return f"in spans of {page.span_s:g} s: {line.percent} %, {line.memory_mib} MiB, {line.power_w} W"


#: in this order: what it shows, and its check
CHECKS: Final[tuple[tuple[str, Callable[[Rig], Awaitable[str]]], ...]] = (
    ("inventory by NVML", inventory),
    ("memory of idle GPUs", idle_memory),
    ("health, and a wait for events", events),
    ("a job's variables name its leased GPU and no other", inside),
    ("the kernel keeps a job to its GPUs", fence),
    ("memory seen free before a GPU returns", free_again),
    ("no next job before memory is back", next_waits),
    ("two jobs on two GPUs", two_gpus),
    ("an audit of processes without a lease", audit),
    ("the limiter: at the limit and a byte beyond", limiter),
    ("the limiter: its cost", limiter_cost),
    ("the memory guard", guard),
    ("the memory guard, of three that share a GPU", guard_sharers),
    ("frozen jobs", freeze),
    ("a large job frozen and resumed", freeze_large),
    ("a job frozen for want of use, and its GPU lent", idle),
    ("PyTorch at the limit", torch_limit),
    ("the limiter: its cost in training", training_cost),
    ("two training jobs by their shares", two_shares),
    ("a training job frozen and resumed", training_frozen),
    ("a model frozen for want of use, and its GPU lent", idle_training),
    ("live use of a training job", use),
    ("mps", mps),
)

#: the same, beside an operator's MPS daemon
OPERATORS: Final[tuple[tuple[str, Callable[[Rig], Awaitable[str]]], ...]] = (
    ("mps: two training jobs under an operator's daemon", operators_pair),
    ("mps: ends inside a long kernel", operators_ends),
    ("mps: live use of a client", operators_use),
    ("mps: a job that has its GPU alone is frozen", operators_exclusive),
)

__all__ = ["CHECKS", "OPERATORS", "NoGpu"]
