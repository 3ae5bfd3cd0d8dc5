"""The NVML inventory against a driver played in Python: boards that lack answers, fail alone, or never come back."""

from __future__ import annotations

import asyncio
import importlib
import os
import pwd
import queue
import threading
import warnings
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from moorage.worker.inventory.base import FREE_TOLERANCE_MIB, DeviceProcess, SlotReading
from moorage.worker.inventory.faults import Fault
from moorage.worker.inventory.nvml import BASELINE_ASSUMED_MIB, NvmlInventory, NvmlUnavailable, open_nvml

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    pynvml: Any = importlib.import_module("pynvml")

T = TypeVar("T")
MIB = 1024 * 1024


@dataclass
class Board:
    """One played device. `errors` says which calls fail and how; `hang` holds every read of it until set."""

    uuid: str
    pci: str = "00000000:17:00.0"
    used_mib: int = 1
    total_mib: int = 81559
    temperature_c: int = 31
    uncorrected: int = 0
    util_percent: int = 0
    mig: int = 0
    pids: dict[int, int | None] = field(default_factory=dict)
    mps_pids: list[int] = field(default_factory=list)
    linked: bool = True
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    throttled: int = 0
    recovery_action: int = 0
    event_types: int = 0xB
    minor: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    hang: threading.Event | None = None
    reads: int = 0


class PlayedNvml:
    """The calls of pynvml that we make, over `boards`, with pynvml's own constants and error classes."""

    def __init__(self, *boards: Board, errors: dict[str, int] | None = None) -> None:
        self.boards = boards
        self.errors = errors or {}
        self.old = False  # a library older than row remapping
        self.events: queue.Queue[tuple[Any, int, int] | int] = queue.Queue()
        self.registered: dict[str, int] = {}
        self.freed = threading.Event()
        self.initialised = threading.Event()
        self.ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML"):
            return getattr(pynvml, name)
        if name == "nvmlMemory_v2":
            return pynvml.nvmlMemory_v2
        raise AttributeError(name)

    def _check(self, call: str, board: Board | None = None) -> None:
        code = (board.errors if board else self.errors).get(call)
        if code is not None:
            raise pynvml.NVMLError(code)

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.initialised.set()

    def nvmlShutdown(self) -> None:
        self.ended.set()

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:
        self._check("handle", self.boards[index])
        return self.boards[index]

    def nvmlDeviceGetPciInfo(self, board: Board) -> Any:
        return SimpleNamespace(busId=board.pci.encode())

    def nvmlDeviceGetName(self, board: Board) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUUID(self, board: Board) -> str:
        self._check("uuid", board)
        return board.uuid

    def nvmlDeviceGetMinorNumber(self, board: Board) -> int:
        return board.minor

    def nvmlDeviceGetCudaComputeCapability(self, board: Board) -> tuple[int, int]:
        self._check("compute", board)
        return 9, 0

    def nvmlDeviceGetMigMode(self, board: Board) -> list[int]:
        self._check("mig", board)
        return [board.mig, board.mig]

    def nvmlDeviceGetMemoryInfo(self, board: Board, version: Any = None) -> Any:
        board.reads += 1
        if board.hang is not None:
            board.hang.wait(30)
        self._check("memory", board)
        if version is not None:
            self._check("memory_v2", board)
        reserved_mib = 0 if version is not None else 600
        return SimpleNamespace(total=board.total_mib * MIB, used=(board.used_mib + reserved_mib) * MIB)

    def nvmlDeviceGetTemperature(self, board: Board, sensor: int) -> int:
        self._check("temperature", board)
        return board.temperature_c

    def nvmlDeviceGetTotalEccErrors(self, board: Board, kind: int, counter: int) -> int:
        self._check("ecc", board)
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return board.uncorrected

    def nvmlDeviceGetUtilizationRates(self, board: Board) -> Any:
        self._check("util", board)
        return SimpleNamespace(gpu=board.util_percent)

    def nvmlDeviceGetComputeRunningProcesses(self, board: Board) -> list[Any]:
        self._check("processes", board)
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=None if used is None else used * MIB)
            for pid, used in board.pids.items()
        ]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, board: Board) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in board.mps_pids]

    def nvmlDeviceGetGraphicsRunningProcesses(self, board: Board) -> list[Any]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def __getattribute__(self, name: str) -> Any:
        if name in ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues") and object.__getattribute__(self, "old"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def nvmlDeviceGetRemappedRows(self, board: Board) -> tuple[int, int, int, int]:
        self._check("rows", board)
        return board.rows

    def nvmlDeviceGetFieldValues(self, board: Board, fields: list[int]) -> list[Any]:
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        value = SimpleNamespace(uiVal=board.recovery_action)
        return [SimpleNamespace(nvmlReturn=0 if board.recovery_action >= 0 else 3, value=value)]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, board: Board) -> int:
        return board.throttled

    def nvmlDeviceGetSupportedEventTypes(self, board: Board) -> int:
        self._check("events", board)
        return board.event_types

    def nvmlEventSetCreate(self) -> Any:
        self._check("nvmlEventSetCreate")
        return object()

    def nvmlDeviceRegisterEvents(self, board: Board, wanted: int, events: Any) -> None:
        self.registered[board.uuid] = wanted

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
        try:
            found = self.events.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        if isinstance(found, int):
            raise pynvml.NVMLError(found)
        board, kind, data = found
        return SimpleNamespace(device=board, eventType=kind, eventData=data)

    def nvmlEventSetFree(self, events: Any) -> None:
        assert not self.ended.is_set(), "the library is still in use"
        self.freed.set()

    def nvmlDeviceGetP2PStatus(self, one: Board, other: Board, what: int) -> int:
        assert what == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        self._check("p2p", one)
        return int(pynvml.NVML_P2P_STATUS_OK) if one.linked and other.linked else 1


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def opened(*boards: Board, folder: Path, **more: Any) -> NvmlInventory:
    return await open_nvml(PlayedNvml(*boards), sysfs=folder / "sys", proc=folder / "proc", **more)


def test_devices_are_described_in_the_order_of_the_driver(tmp_path: Path) -> None:
    node = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    node.mkdir(parents=True)
    (node / "numa_node").write_text("1\n")
    boards = [
        Board("GPU-a"),
        Board("GPU-b", pci="00000000:2A:00.0", linked=False, mig=1),
        Board("GPU-c", pci="00000001:2A:00.0"),
    ]
    found = run(opened(*boards, folder=tmp_path))
    first, second, third = found.devices()
    assert (first.index, first.vendor, first.uuid, first.name) == (0, "nvidia", "GPU-a", "NVIDIA H100 80GB HBM3")
    assert (first.memory_mib, first.compute, first.pci, first.numa) == (81559, "9.0", "00000000:17:00.0", 1)
    assert (first.peers, second.peers, third.peers) == ([2], [], [0])
    assert (first.mig, second.mig, second.numa) == (False, True, -1)
    assert found.simulated is False
    assert found.faults == []


@pytest.mark.parametrize("missing", ["NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED"])
def test_no_library_or_no_driver_is_a_host_without_gpus(missing: str) -> None:
    async def scene() -> None:
        found = await open_nvml(PlayedNvml(errors={"nvmlInit": getattr(pynvml, missing)}))
        assert found.devices() == []
        assert await found.sample() == []
        found.close()

    run(scene())


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has a driver")
def test_the_real_library_says_that_there_is_none() -> None:
    assert run(open_nvml()).devices() == []


def test_a_driver_that_is_there_and_fails_is_an_error() -> None:
    with pytest.raises(NvmlUnavailable, match=r"Unknown|Mismatch|mismatch"):
        run(open_nvml(PlayedNvml(errors={"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})))


def test_a_driver_that_hangs_at_the_start_is_an_error_in_bounded_time() -> None:
    async def scene() -> None:
        board = Board("GPU-a", hang=threading.Event())
        with pytest.raises(NvmlUnavailable, match="no answer within"):
            await open_nvml(PlayedNvml(board), open_timeout_s=0.05)
        assert board.hang is not None
        board.hang.set()

    run(scene())


READINGS: dict[str, tuple[Board, SlotReading]] = {
    "idle": (Board("GPU-a"), SlotReading(memory_used_mib=1, temperature_c=31)),
    "busy": (
        Board("GPU-a", util_percent=97, used_mib=4000, temperature_c=90),
        SlotReading(97, 4000, 90),
    ),
    "thermal": (Board("GPU-a", temperature_c=91), SlotReading(0, 1, 91, "thermal")),
    "ecc comes before temperature": (
        Board("GPU-a", temperature_c=99, uncorrected=1),
        SlotReading(0, 1, 99, "ecc", uncorrected_errors=1),
    ),
    "a board that cannot tell": (
        Board("GPU-a", errors=dict.fromkeys(("temperature", "ecc", "util", "mig", "compute"), 3)),
        SlotReading(memory_used_mib=1),
    ),
    "no right to see processes": (
        Board("GPU-a", errors={"processes": int(pynvml.NVML_ERROR_NO_PERMISSION)}),
        SlotReading(memory_used_mib=1, temperature_c=31),
    ),
    "an older driver counts what it reserves": (
        Board("GPU-a", errors={"memory_v2": int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)}),
        SlotReading(memory_used_mib=601, temperature_c=31),
    ),
}


@pytest.mark.parametrize(("board", "reading"), READINGS.values(), ids=READINGS)
def test_readings(board: Board, reading: SlotReading, tmp_path: Path) -> None:
    async def scene() -> None:
        assert await (await opened(board, folder=tmp_path)).sample() == [reading]

    run(scene())


@pytest.mark.parametrize("call", ["memory", "temperature", "ecc", "util", "processes"])
def test_a_device_that_fails_alone_is_unresponsive_and_the_others_go_on(call: str, tmp_path: Path) -> None:
    async def scene() -> None:
        boards = [Board("GPU-a"), Board("GPU-b"), Board("GPU-c")]
        found = await opened(*boards, folder=tmp_path)
        boards[1].errors[call] = pynvml.NVML_ERROR_GPU_IS_LOST
        assert [reading.health for reading in await found.sample()] == ["ok", "unresponsive", "ok"]
        assert await found.memory_is_free(1) is False
        boards[1].errors.clear()
        assert [reading.health for reading in await found.sample()] == ["ok", "ok", "ok"]

    run(scene())


@pytest.mark.parametrize("call", ["handle", "memory"])
def test_a_device_lost_before_the_start_is_no_slot_and_is_told(call: str, tmp_path: Path) -> None:
    boards = [Board("GPU-a", errors={call: pynvml.NVML_ERROR_GPU_IS_LOST}), Board("GPU-b")]
    found = run(opened(*boards, folder=tmp_path))
    assert [(device.index, device.uuid, device.peers) for device in found.devices()] == [(1, "GPU-b", [])]
    assert found.faults[0].startswith("device 0: ")


def test_a_link_that_cannot_be_told_is_none(tmp_path: Path) -> None:
    boards = [Board("GPU-a", errors={"p2p": pynvml.NVML_ERROR_UNKNOWN}), Board("GPU-b")]
    assert [device.peers for device in run(opened(*boards, folder=tmp_path)).devices()] == [[], [0]]


def test_a_device_that_hangs_is_unresponsive_and_not_asked_again_until_it_answers(tmp_path: Path) -> None:
    async def scene() -> None:
        boards = [Board("GPU-a"), Board("GPU-b")]
        found = await opened(*boards, folder=tmp_path, sample_timeout_s=0.05)
        boards[0].hang = threading.Event()
        before = boards[0].reads
        for _ in range(3):
            assert [reading.health for reading in await found.sample()] == ["unresponsive", "ok"]
        assert await found.memory_is_free(0) is False
        assert boards[0].reads == before + 1
        found.close()  # a call is under way: the library is left alone
        boards[0].hang.set()
        assert [reading.health for reading in await found.sample()] == ["unresponsive"] * 2

    run(scene())


def test_a_device_that_answers_late_is_well_again(tmp_path: Path) -> None:
    async def scene() -> None:
        board = Board("GPU-a")
        found = await opened(board, folder=tmp_path, sample_timeout_s=0.05)
        board.hang = threading.Event()
        assert (await found.sample())[0].health == "unresponsive"
        board.hang.set()
        deadline = asyncio.get_running_loop().time() + 10
        while (await found.sample())[0].health != "ok":
            assert asyncio.get_running_loop().time() < deadline

    run(scene())


def test_callers_at_the_same_time_share_a_reading_and_freedom_is_asked_anew(tmp_path: Path) -> None:
    async def scene() -> None:
        board = Board("GPU-a", used_mib=9)
        found = await opened(board, folder=tmp_path)
        board.hang, before = threading.Event(), board.reads
        samples = [asyncio.create_task(found.sample()) for _ in range(2)]
        deadline = asyncio.get_running_loop().time() + 10
        while board.reads == before:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.wait(samples, timeout=0)
        free = asyncio.create_task(found.memory_is_free(0))  # the reading under way began before this question
        await asyncio.wait([free], timeout=0)
        board.hang.set()
        assert [await sample for sample in samples] == [[SlotReading(0, 9, 31)]] * 2
        assert await free
        assert board.reads == before + 2

    run(scene())


def test_memory_is_free_only_back_at_the_baseline(tmp_path: Path) -> None:
    async def scene() -> None:
        board = Board("GPU-a", used_mib=12)
        found = await opened(board, folder=tmp_path)
        assert found.memory_baseline_mib(0) == 12
        board.used_mib, board.pids = 40_000, {77: 39_000}
        assert await found.memory_is_free(0) is False
        board.pids = {}
        assert await found.memory_is_free(0) is False  # the process is gone and its memory is not
        board.used_mib = 12 + FREE_TOLERANCE_MIB + 1
        assert await found.memory_is_free(0) is False
        board.used_mib = 12 + FREE_TOLERANCE_MIB
        assert await found.memory_is_free(0) is True
        assert found.memory_baseline_mib(0) == 12
        board.used_mib = 3
        await found.sample()
        assert found.memory_baseline_mib(0) == 3

    run(scene())


def test_the_baseline_of_a_device_in_use_at_the_start_is_assumed_then_seen(tmp_path: Path) -> None:
    async def scene() -> None:
        board = Board("GPU-a", used_mib=30_000, pids={77: 29_000})
        found = await opened(board, folder=tmp_path)
        assert found.memory_baseline_mib(0) == BASELINE_ASSUMED_MIB
        assert await found.memory_is_free(0) is False
        board.used_mib, board.pids = 5, {}
        assert await found.memory_is_free(0) is True
        assert found.memory_baseline_mib(0) == 5

    run(scene())


def test_holders_are_named_and_those_that_are_not_ours_are_foreign(tmp_path: Path) -> None:
    comm = tmp_path / "proc/8812/comm"
    comm.parent.mkdir(parents=True)
    comm.write_text("python\n")
    board = Board("GPU-a", pids={8812: 300, 77: None}, mps_pids=[77, 99])

    async def scene() -> None:
        (reading,) = await (await opened(board, folder=tmp_path)).sample()
        assert reading.processes == (DeviceProcess(77), DeviceProcess(99), DeviceProcess(8812, "python", 300))
        assert reading.foreign({77, 99, 8812}) == ""
        who = pwd.getpwuid(os.getuid()).pw_name
        assert reading.foreign({77, 99}) == f"pid 8812 python (user {who})"
        assert reading.foreign({8812, 99}) == "pid 77"

    run(scene())


def test_close_gives_the_library_back_once() -> None:
    async def scene() -> None:
        played = PlayedNvml(Board("GPU-a"))
        found = await open_nvml(played)
        found.close()
        found.close()
        assert await asyncio.to_thread(played.ended.wait, 10)

    run(scene())


# ------------------------------------------------------------------------------------------------------- health


@pytest.mark.parametrize(
    ("board", "kinds"),
    [
        (Board("GPU-a"), []),
        (Board("GPU-a", rows=(1, 2, 0, 0)), []),
        (Board("GPU-a", rows=(0, 1, 1, 0)), ["reset-needed"]),
        (Board("GPU-a", rows=(0, 1, 1, 1)), ["remap"]),
        (Board("GPU-a", recovery_action=1), ["reset-needed"]),
        (Board("GPU-a", recovery_action=-1), []),
        (Board("GPU-a", throttled=0x40), ["thermal"]),
        (Board("GPU-a", throttled=0x24), []),
        (Board("GPU-a", errors={"rows": int(pynvml.NVML_ERROR_NOT_SUPPORTED)}), []),
    ],
)
def test_what_lasts_is_read_with_the_rest(board: Board, kinds: list[str], tmp_path: Path) -> None:
    async def scene() -> None:
        [reading] = await (await opened(board, folder=tmp_path)).sample()
        assert [fault.kind for fault in reading.faults] == kinds

    run(scene())


def test_a_library_without_these_calls_tells_the_rest(tmp_path: Path) -> None:
    async def scene() -> None:
        played = PlayedNvml(Board("GPU-a", rows=(0, 0, 1, 1)))
        played.old = True
        [reading] = await (await open_nvml(played, proc=tmp_path)).sample()
        assert (reading.health, reading.faults) == ("ok", ())

    run(scene())


@pytest.mark.parametrize(("error", "kind"), [("GPU_IS_LOST", "missing"), ("RESET_REQUIRED", "reset-needed")])
def test_a_device_that_is_lost_is_told_from_one_that_is_silent(error: str, kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        boards = [Board("GPU-a"), Board("GPU-b")]
        found = await opened(*boards, folder=tmp_path)
        boards[1].errors["memory"] = getattr(pynvml, f"NVML_ERROR_{error}")
        first, second = await found.sample()
        assert first.faults == ()
        assert (second.health, [fault.kind for fault in second.faults]) == ("unresponsive", [kind])

    run(scene())


class Heard:
    """What an inventory reports by itself."""

    def __init__(self) -> None:
        self.faults: list[tuple[int, str]] = []
        self.some = asyncio.Event()

    def __call__(self, slot: int, fault: Fault) -> None:
        self.faults.append((slot, fault.detail))
        self.some.set()

    async def next(self) -> tuple[int, str]:
        async with asyncio.timeout(30):
            await self.some.wait()
        self.some.clear()
        return self.faults[-1]


def test_xid_events_come_from_a_thread_of_their_own_to_the_loop_that_watches() -> None:
    async def scene() -> None:
        boards = [Board("GPU-a"), Board("GPU-b"), Board("GPU-c", event_types=0)]
        played, heard = PlayedNvml(*boards), Heard()
        found = await open_nvml(played)
        found.watch(heard)
        played.events.put((boards[1], 0x8, 79))
        assert await heard.next() == (1, "Xid 79: the GPU has fallen off the bus")
        boards[1].errors["uuid"] = pynvml.NVML_ERROR_GPU_IS_LOST  # lost, it has no name any more
        played.events.put((boards[1], 0x8, 119))
        assert (await heard.next())[0] == 1
        played.events.put((boards[0], 0x2, 0))
        assert await heard.next() == (0, "Xid 48: an uncorrectable (double-bit) memory error")
        assert played.registered == {"GPU-a": 0xA, "GPU-b": 0xA}, "only what it supports, and we want"
        found.close()
        assert await asyncio.to_thread(played.ended.wait, 10), "the library is given back once nobody waits in it"
        assert played.freed.is_set()

    run(scene())


def test_an_error_of_the_event_set_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.worker.inventory.nvml_events.AGAIN_S", 0.01)

    async def scene() -> None:
        board = Board("GPU-a")
        played, heard = PlayedNvml(board), Heard()
        found = await open_nvml(played)
        found.watch(heard)
        played.events.put(int(pynvml.NVML_ERROR_GPU_IS_LOST))
        played.events.put((board, 0x8, 13))
        assert await heard.next() == (0, "Xid 13")
        found.close()

    run(scene())


@pytest.mark.parametrize("error", ["nvmlEventSetCreate", "events"])
def test_a_driver_without_events_is_no_error(error: str, tmp_path: Path) -> None:
    async def scene() -> None:
        code = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        board = Board("GPU-a", errors={error: code})
        played = PlayedNvml(board, errors={error: code})
        found = await open_nvml(played, proc=tmp_path)
        found.watch(Heard())
        assert [reading.health for reading in await found.sample()] == ["ok"]
        found.close()
        assert await asyncio.to_thread(played.ended.wait, 10)

    run(scene())
