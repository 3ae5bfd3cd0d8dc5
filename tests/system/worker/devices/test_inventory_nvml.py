"""The NVML inventory over a stub of the driver in C: boards that lack answers, fail alone, or never come back."""

from __future__ import annotations

import asyncio
import importlib
import os
import pwd
import warnings
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from moorage.worker.devices.device_health import DeviceHealth
from moorage.worker.devices.readers.base import FREE_TOLERANCE_MIB, DeviceProcess, SlotReading
from moorage.worker.devices.readers.faults import Fault
from moorage.worker.devices.readers.nvml import BASELINE_ASSUMED_MIB, NvmlInventory, NvmlUnavailable, open_nvml
from tests.nvidia.stub import FOLDER_VARIABLE, Board, Stub, load
from tests.waiting import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    pynvml: Any = importlib.import_module("pynvml")

T = TypeVar("T")


@pytest.fixture(autouse=True)
def driver_of_one_test() -> Iterator[None]:
    """This process uses the devices of the test's stub, and afterwards none."""
    load()
    yield
    os.environ.pop(FOLDER_VARIABLE, None)


def machine(folder: Path, *boards: Board, extra: tuple[str, ...] = ()) -> Stub:
    stub = Stub(folder / "stub", *boards, extra=extra)
    os.environ[FOLDER_VARIABLE] = str(stub.folder)
    return stub


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def fails(call: str, code: int) -> str:
    return f"fail call={call} code={int(code)}"


def reads(board: Board) -> int:
    assert board.stub is not None
    return board.stub.calls("nvmlDeviceGetMemoryInfo_v2", board.uuid)


async def opened(*boards: Board, folder: Path, **more: Any) -> NvmlInventory:
    machine(folder, *boards)
    return await open_nvml(sysfs=folder / "sys", proc=folder / "proc", **more)


def test_devices_are_described_in_the_order_of_the_driver(tmp_path: Path) -> None:
    node = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    node.mkdir(parents=True)
    (node / "numa_node").write_text("1\n")
    boards = [
        Board("GPU-a"),
        Board("GPU-b", pci="00000000:2A:00.0", more={"linked": 0, "mig": 1}),
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
async def test_no_library_or_no_driver_is_a_host_without_gpus(missing: str, tmp_path: Path) -> None:
    machine(tmp_path, extra=(fails("nvmlInitWithFlags", getattr(pynvml, missing)),))
    found = await open_nvml()
    assert found.devices() == []
    assert await found.sample() == []
    found.close()


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this host has a driver")
def test_the_real_library_says_that_there_is_none() -> None:
    assert run(open_nvml()).devices() == []


def test_a_driver_that_is_there_and_fails_is_an_error(tmp_path: Path) -> None:
    machine(tmp_path, extra=(fails("nvmlInitWithFlags", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),))
    with pytest.raises(NvmlUnavailable, match=r"Unknown|Mismatch|mismatch"):
        run(open_nvml())


async def test_a_driver_that_hangs_at_the_start_is_an_error_in_bounded_time(tmp_path: Path) -> None:
    board = Board("GPU-a", hangs={"memory"})
    with pytest.raises(NvmlUnavailable, match="no answer within"):
        await opened(board, folder=tmp_path, open_timeout_s=0.05)
    board.set(hangs=set())


READINGS: dict[str, tuple[Board, SlotReading]] = {
    "idle": (Board("GPU-a"), SlotReading(0, 1, 31)),
    "busy": (
        Board("GPU-a", used_mib=4000, more={"util": 97, "temperature": 90}),
        SlotReading(97, 4000, 90),
    ),
    "thermal": (Board("GPU-a", more={"temperature": 91}), SlotReading(0, 1, 91, "thermal")),
    "ecc comes before temperature": (
        Board("GPU-a", more={"temperature": 99, "uncorrected": 1}),
        SlotReading(0, 1, 99, "ecc", uncorrected_errors=1),
    ),
    "a board that cannot tell": (
        Board("GPU-a", errors=dict.fromkeys(("temperature", "ecc", "util", "mig", "compute"), 3)),
        SlotReading(memory_used_mib=1),
    ),
    "no right to see processes": (
        Board("GPU-a", errors={"processes": int(pynvml.NVML_ERROR_NO_PERMISSION)}),
        SlotReading(0, 1, 31),
    ),
    "an older driver counts what it reserves": (
        Board("GPU-a", errors={"memory_v2": int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)}),
        SlotReading(0, 601, 31),
    ),
}


def test_use_is_the_greatest_of_compute_encoder_and_decoder(tmp_path: Path) -> None:
    """A transcoder hardly computes: its GPU is in use all the same."""
    board = Board("GPU-a", more={"util": 1, "encoder": 80, "decoder": 35, "power": 71_900, "power_limit": 700_000})

    async def scene() -> None:
        inventory = await opened(board, folder=tmp_path)
        [reading] = await inventory.sample()
        told = (reading.util_percent, reading.encoder_percent, reading.decoder_percent, reading.power_w)
        assert told == (80, 80, 35, 71)
        assert reading.power_limit_w == 700
        board.set(more={"decoder": 35}, errors={"util": int(pynvml.NVML_ERROR_NOT_SUPPORTED)})
        [reading] = await inventory.sample()
        assert (reading.util_percent, reading.power_w, reading.power_limit_w) == (35, None, None)

    run(scene())


@pytest.mark.parametrize(
    ("more", "peak"),
    [
        ({"peak": 40}, 40),
        ({"peak_encoder": 30, "peak_decoder": 7}, 30),
        ({"peak": 40, "peak_age_s": 900}, 0),
        ({"peak": 40, "peak_age_s": -900}, 0),
        ({}, 0),
    ],
    ids=["it computed", "it encoded", "long ago", "a sample from the future", "nothing"],
)
async def test_work_between_two_readings_is_seen_in_the_samples(
    more: dict[str, int], peak: int, tmp_path: Path
) -> None:
    [reading] = await (await opened(Board("GPU-a", more={**more}), folder=tmp_path)).sample()
    assert (reading.util_percent, reading.peak_percent) == (0, peak)
    assert reading.shows_use is (peak > 0)


@pytest.mark.parametrize("errors", [{}, {"fabric": int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)}], ids=["new", "older"])
@pytest.mark.parametrize(
    ("more", "detail"),
    [
        ({}, ""),
        ({"fabric": 1}, "the NVLink fabric is not ready (not started): is nvidia-fabricmanager running?"),
        ({"fabric": 2}, "the NVLink fabric is not ready (in progress): is nvidia-fabricmanager running?"),
        ({"fabric": 3}, ""),
        ({"fabric": 3, "fabric_status": 999}, "the GPU could not join the NVLink fabric (NVML error 999)"),
    ],
)
async def test_a_gpu_whose_fabric_is_not_ready_has_a_fault(
    more: dict[str, int], detail: str, errors: dict[str, int], tmp_path: Path
) -> None:
    """NVML is well then, and every job fails."""
    inventory = await opened(Board("GPU-a", more={**more}, errors=errors), folder=tmp_path)
    [reading] = await inventory.sample()
    assert (reading.health, [fault.detail for fault in reading.faults]) == ("ok", [detail] if detail else [])
    health = DeviceHealth(inventory.devices(), boot="b", now=0.0)
    health.read(0, reading, 1.0)
    assert [(each.kind, each.ends) for each in health.unwell(1.0)] == ([("fabric", False)] if detail else [])
    health.read(0, SlotReading(0), 2.0)
    assert health.verdict(0, 2.0).kind == "ok", "it is used again at once"


async def test_a_broken_route_of_the_fabric_is_a_fault(tmp_path: Path) -> None:
    for health, detail in ((2 << 4, []), (1 << 4, ["a route of the NVLink fabric is broken"])):
        board = Board("GPU-a", more={"fabric": 3, "fabric_health": health})
        [reading] = await (await opened(board, folder=tmp_path)).sample()
        assert [fault.detail for fault in reading.faults] == detail


async def test_a_driver_without_samples_tells_all_else(tmp_path: Path) -> None:
    board = Board("GPU-a", more={"peak": 40, "util": 3}, errors={"samples": 999, "encoder": 3})
    [reading] = await (await opened(board, folder=tmp_path)).sample()
    assert (reading.health, reading.util_percent, reading.peak_percent) == ("ok", 3, 0)


@pytest.mark.parametrize(("board", "reading"), READINGS.values(), ids=READINGS)
async def test_readings(board: Board, reading: SlotReading, tmp_path: Path) -> None:
    assert await (await opened(board, folder=tmp_path)).sample() == [reading]


@pytest.mark.parametrize("call", ["memory", "temperature", "ecc", "util", "processes"])
async def test_a_device_that_fails_alone_is_unresponsive_and_the_others_go_on(call: str, tmp_path: Path) -> None:
    boards = [Board("GPU-a"), Board("GPU-b"), Board("GPU-c")]
    found = await opened(*boards, folder=tmp_path)
    boards[1].set(errors={call: pynvml.NVML_ERROR_GPU_IS_LOST})
    assert [reading.health for reading in await found.sample()] == ["ok", "unresponsive", "ok"]
    assert await found.memory_is_free(1) is False
    boards[1].set(errors={})
    assert [reading.health for reading in await found.sample()] == ["ok", "ok", "ok"]


@pytest.mark.parametrize("call", ["handle", "memory"])
def test_a_device_lost_before_the_start_is_no_slot_and_is_told(call: str, tmp_path: Path) -> None:
    boards = [Board("GPU-a", errors={call: pynvml.NVML_ERROR_GPU_IS_LOST}), Board("GPU-b")]
    found = run(opened(*boards, folder=tmp_path))
    assert [(device.index, device.uuid, device.peers) for device in found.devices()] == [(1, "GPU-b", [])]
    assert found.faults[0].startswith("device 0: ")


def test_a_link_that_cannot_be_told_is_none(tmp_path: Path) -> None:
    boards = [Board("GPU-a", errors={"p2p": pynvml.NVML_ERROR_UNKNOWN}), Board("GPU-b")]
    assert [device.peers for device in run(opened(*boards, folder=tmp_path)).devices()] == [[], [0]]


async def test_a_device_that_hangs_is_unresponsive_and_not_asked_again_until_it_answers(tmp_path: Path) -> None:
    boards = [Board("GPU-a"), Board("GPU-b")]
    found = await opened(*boards, folder=tmp_path, sample_timeout_s=0.05)
    boards[0].set(hangs={"memory"})
    before = reads(boards[0])

    async def one_alone() -> bool:  # its neighbour's thread may be late, too
        return [reading.health for reading in await found.sample()] == ["unresponsive", "ok"]

    for _ in range(3):
        await until(one_alone)
    assert await found.memory_is_free(0) is False
    assert reads(boards[0]) == before + 1
    found.close()  # a call is under way: the library is left alone
    boards[0].set(hangs=set())
    assert [reading.health for reading in await found.sample()] == ["unresponsive"] * 2


async def test_a_device_that_answers_late_is_well_again(tmp_path: Path) -> None:
    board = Board("GPU-a")
    found = await opened(board, folder=tmp_path, sample_timeout_s=0.05)
    board.set(hangs={"memory"})
    assert (await found.sample())[0].health == "unresponsive"
    board.set(hangs=set())
    deadline = asyncio.get_running_loop().time() + 10
    while (await found.sample())[0].health != "ok":
        assert asyncio.get_running_loop().time() < deadline


async def test_callers_at_the_same_time_share_a_reading_and_freedom_is_asked_anew(tmp_path: Path) -> None:
    board = Board("GPU-a", used_mib=9)
    found = await opened(board, folder=tmp_path)
    before = reads(board)
    board.set(hangs={"memory"})
    samples = [asyncio.create_task(found.sample()) for _ in range(2)]
    deadline = asyncio.get_running_loop().time() + 10
    while reads(board) == before:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.wait(samples, timeout=0)
    free = asyncio.create_task(found.memory_is_free(0))  # the reading under way began before this question
    await asyncio.wait([free], timeout=0)
    board.set(hangs=set())
    assert [await sample for sample in samples] == [[SlotReading(0, 9, 31)]] * 2
    assert await free
    assert reads(board) == before + 2


async def test_memory_is_free_only_back_at_the_baseline(tmp_path: Path) -> None:
    board = Board("GPU-a", used_mib=12)
    found = await opened(board, folder=tmp_path)
    assert found.memory_baseline_mib(0) == 12
    board.set(used_mib=40_000, pids={77: 39_000})
    assert await found.memory_is_free(0) is False
    board.set(pids={})
    assert await found.memory_is_free(0) is False  # the process is gone and its memory is not
    board.set(used_mib=12 + FREE_TOLERANCE_MIB + 1)
    assert await found.memory_is_free(0) is False
    board.set(used_mib=12 + FREE_TOLERANCE_MIB)
    assert await found.memory_is_free(0) is True
    assert found.memory_baseline_mib(0) == 12
    board.set(used_mib=3)
    await found.sample()
    assert found.memory_baseline_mib(0) == 3


async def test_the_baseline_of_a_device_in_use_at_the_start_is_assumed_then_seen(tmp_path: Path) -> None:
    board = Board("GPU-a", used_mib=30_000, pids={77: 29_000})
    found = await opened(board, folder=tmp_path)
    assert found.memory_baseline_mib(0) == BASELINE_ASSUMED_MIB
    assert await found.memory_is_free(0) is False
    board.set(used_mib=5, pids={})
    assert await found.memory_is_free(0) is True
    assert found.memory_baseline_mib(0) == 5


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


async def test_close_gives_the_library_back_once(tmp_path: Path) -> None:
    stub = machine(tmp_path, Board("GPU-a"))
    found = await open_nvml()
    found.close()
    found.close()
    await until(lambda: stub.calls("nvmlShutdown"), what="the library is given back")
    assert stub.calls("nvmlShutdown") == 1


async def test_close_gives_the_library_back_once_a_late_call_returns(tmp_path: Path) -> None:
    board = Board("GPU-a")
    stub = machine(tmp_path, board)
    found = await open_nvml(sample_timeout_s=0.05)
    board.set(hangs={"memory"})
    assert (await found.sample())[0].health == "unresponsive"
    found.close()
    closed = asyncio.create_task(found.closed())
    await asyncio.wait([closed], timeout=0)
    assert not stub.calls("nvmlShutdown"), "a call still uses it"
    board.set(hangs=set())
    await closed
    assert stub.calls("nvmlShutdown") == 1


# ------------------------------------------------------------------------------------------------------- health


@pytest.mark.parametrize(
    ("board", "kinds"),
    [
        (Board("GPU-a"), []),
        (Board("GPU-a", more={"rows_pending": 0}), []),
        (Board("GPU-a", more={"rows_pending": 1}), ["reset-needed"]),
        (Board("GPU-a", more={"rows_pending": 1, "rows_failed": 1}), ["remap"]),
        (Board("GPU-a", more={"recovery": 1}), ["reset-needed"]),
        (Board("GPU-a", more={"recovery": -1}), []),
        (Board("GPU-a", more={"throttled": 0x40}), ["thermal"]),
        (Board("GPU-a", more={"throttled": 0x24}), []),
        (Board("GPU-a", errors={"rows": int(pynvml.NVML_ERROR_NOT_SUPPORTED)}), []),
    ],
)
async def test_what_lasts_is_read_with_the_rest(board: Board, kinds: list[str], tmp_path: Path) -> None:
    [reading] = await (await opened(board, folder=tmp_path)).sample()
    assert [fault.kind for fault in reading.faults] == kinds


async def test_a_library_without_these_calls_tells_the_rest(tmp_path: Path) -> None:
    calls = ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues")
    machine(tmp_path, Board("GPU-a", more={"rows_failed": 1}), extra=tuple(f"absent call={call}" for call in calls))
    [reading] = await (await open_nvml()).sample()
    assert (reading.health, reading.faults) == ("ok", ())


@pytest.mark.parametrize(("error", "kind"), [("GPU_IS_LOST", "missing"), ("RESET_REQUIRED", "reset-needed")])
async def test_a_device_that_is_lost_is_told_from_one_that_is_silent(error: str, kind: str, tmp_path: Path) -> None:
    boards = [Board("GPU-a"), Board("GPU-b")]
    found = await opened(*boards, folder=tmp_path)
    boards[1].set(errors={"memory": getattr(pynvml, f"NVML_ERROR_{error}")})
    first, second = await found.sample()
    assert first.faults == ()
    assert (second.health, [fault.kind for fault in second.faults]) == ("unresponsive", [kind])


class Heard:
    """What an inventory reports by itself."""

    def __init__(self) -> None:
        self.faults: list[tuple[int, str]] = []
        self.some = asyncio.Event()

    def __call__(self, slot: int, fault: Fault) -> None:
        self.faults.append((slot, fault.detail))
        self.some.set()

    async def next(self) -> tuple[int, str]:
        async with asyncio.timeout(60):
            await self.some.wait()
        self.some.clear()
        return self.faults[-1]


async def test_xid_events_come_from_a_thread_of_their_own_to_the_loop_that_watches(tmp_path: Path) -> None:
    boards = [Board("GPU-a"), Board("GPU-b", more={"events": 0xB}), Board("GPU-c", more={"events": 0})]
    stub, heard = machine(tmp_path, *boards), Heard()
    found = await open_nvml()
    found.watch(heard)
    stub.event("GPU-b", 0x8, 79)
    assert await heard.next() == (1, "Xid 79: the GPU has fallen off the bus")
    boards[1].set(errors={"uuid": pynvml.NVML_ERROR_GPU_IS_LOST})  # lost, it has no name any more
    stub.event("GPU-b", 0x8, 119)
    assert (await heard.next())[0] == 1
    stub.event("GPU-a", 0x2, 0)
    assert await heard.next() == (0, "Xid 48: an uncorrectable (double-bit) memory error")
    assert [stub.calls("nvmlDeviceRegisterEvents", board.uuid) for board in boards] == [1, 1, 0]
    found.close()
    await until(lambda: stub.calls("nvmlShutdown"), what="the library is given back once nobody waits in it")
    assert stub.calls("nvmlEventSetFree") == 1


def test_an_error_of_the_event_set_is_survived(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("moorage.worker.devices.readers.nvml_events.AGAIN_S", 0.01)

    async def scene() -> None:
        stub, heard = machine(tmp_path, Board("GPU-a")), Heard()
        found = await open_nvml()
        found.watch(heard)
        stub.event("error", int(pynvml.NVML_ERROR_GPU_IS_LOST))
        stub.event("GPU-a", 0x8, 13)
        assert await heard.next() == (0, "Xid 13")
        found.close()

    run(scene())


@pytest.mark.parametrize("error", ["nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes"])
async def test_a_driver_without_events_is_no_error(error: str, tmp_path: Path) -> None:
    code = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    stub = machine(tmp_path, Board("GPU-a"), extra=(fails(error, code),))
    found = await open_nvml()
    found.watch(Heard())
    assert [reading.health for reading in await found.sample()] == ["ok"]
    found.close()
    await until(lambda: stub.calls("nvmlShutdown"), what="the library is given back")


def used_by(board: Board, folder: Path) -> dict[int, tuple[int, int | None]] | None:
    """What each process uses of a device by one reading: MiB and percent."""

    async def scene() -> dict[int, tuple[int, int | None]] | None:
        [reading] = await (await opened(board, folder=folder)).sample()
        return (
            None
            if reading.used_by is None
            else {pid: (use.memory_mib, use.percent) for pid, use in reading.used_by.items()}
        )

    return run(scene())


WORKS: dict[str, tuple[dict[str, Any], dict[int, tuple[int, int | None]] | None]] = {
    "each as it works": ({"works": {7: 30, 8: 160}}, {7: (100, 30), 8: (200, 100), 9: (0, 0)}),
    "none works": ({}, {7: (100, 0), 8: (200, 0), 9: (0, 0)}),
    "work of long ago": ({"works": {7: (30, 3600), 8: 10}}, {7: (100, 0), 8: (200, 10), 9: (0, 0)}),
    "the board does not tell work": ({"errors": {"worked": 3}}, {7: (100, None), 8: (200, None), 9: (0, None)}),
    "work of no process": ({"more": {"util": 50}}, {7: (100, None), 8: (200, None), 9: (0, None)}),
    "work of a process that is over": (
        {"more": {"util": 50}, "works": {6: 50}},
        {7: (100, 0), 8: (200, 0), 9: (0, 0)},
    ),
    "the board does not tell a size": ({"pids": {7: None, 8: 200}}, None),
    "no right to see processes": ({"errors": {"processes": 4}}, None),
}


@pytest.mark.parametrize(("more", "found"), WORKS.values(), ids=WORKS)
def test_what_processes_use(
    more: dict[str, Any], found: dict[int, tuple[int, int | None]] | None, tmp_path: Path
) -> None:
    board = Board("GPU-a", **{"pids": {7: 100, 8: 200, 9: 0}, **more})
    assert used_by(board, tmp_path) == found


def test_what_an_mps_server_does_is_not_told_by_client(tmp_path: Path) -> None:
    (tmp_path / "proc/5").mkdir(parents=True)
    (tmp_path / "proc/5/comm").write_text("nvidia-cuda-mps\n")
    board = Board("GPU-a", pids={5: 30, 7: 100}, works={5: 60}, more={"util": 60})
    assert used_by(board, tmp_path) == {7: (100, None)}


def test_a_process_that_only_does_graphics_is_counted_where_its_memory_is_known(tmp_path: Path) -> None:
    board = Board("GPU-a", pids={7: 100, 8: 200}, graphics_pids={8: 250, 9: 50, 10: None})

    async def scene() -> None:
        inventory = await opened(board, folder=tmp_path)
        assert await inventory.held(0) == {7: 100, 8: 250, 9: 50}
        board.set(errors={"graphics": int(pynvml.NVML_ERROR_NOT_SUPPORTED)})
        assert await inventory.held(0) == {7: 100, 8: 200}, "a board without graphics"

    run(scene())
