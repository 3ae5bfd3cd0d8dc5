"""What NVML says of how much each process works, in all the ways in which drivers and bindings answer."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from moorage.worker.devices.readers.base import HeldUnknown
from moorage.worker.devices.readers.nvml import NvmlInventory, _Handle

NOW_S = 1_700_000_000.0
NOW_US = int(NOW_S * 1e6)


class Nvml:
    """NVML as pynvml shows it, with the samples that a test gives for each of the two calls."""

    NVMLError = pynvml.NVMLError
    NVML_SUCCESS = pynvml.NVML_SUCCESS
    NVML_ERROR_NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
    NVML_ERROR_NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED

    def __init__(self) -> None:
        self.empty = pynvml.NVML_ERROR_NOT_FOUND
        self.samples: list[Any] = []
        self.error: int | None = None
        self.newer: list[Any] | int = pynvml.NVML_ERROR_NOT_SUPPORTED

    def nvmlDeviceGetProcessUtilization(self, handle: str, seen_us: int) -> list[Any]:
        if self.error is not None:
            raise pynvml.NVMLError(self.error)
        if not self.samples:
            raise pynvml.NVMLError(self.empty)
        return self.samples

    def nvmlDeviceGetProcessesUtilizationInfo(self, handle: str, seen_us: int) -> list[Any]:
        if isinstance(self.newer, int):
            raise pynvml.NVMLError(self.newer)
        return self.newer


class Device:
    """One device of such a driver."""

    def __init__(self, folder: Path) -> None:
        self.api = Nvml()
        self._inventory = NvmlInventory(self.api, [], [_Handle("raw", None, 0, "raw", "GPU-1")], [], folder, 30.0)

    async def worked(self) -> dict[int, int]:
        return await self._inventory.worked(0)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    return Device(tmp_path)


def sample(pid: int, taken_us: int, sm: int, encoder: int = 0, decoder: int = 0) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, timeStamp=taken_us, smUtil=sm, encUtil=encoder, decUtil=decoder)


async def test_the_newest_samples_count_and_no_process_has_more_than_all_of_a_gpu(device: Device) -> None:
    device.api.samples = [
        sample(5, NOW_US - 2, 90),
        sample(5, NOW_US, 20, 30, 5),
        sample(6, NOW_US, 4_000_000, 50),
        sample(7, 1, 9),
    ]
    assert await device.worked() == {5: 30, 6: 100}


@pytest.mark.parametrize("empty", [pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND])
async def test_a_gpu_without_samples_is_idle_whatever_the_bindings_raise_for_that(device: Device, empty: int) -> None:
    device.api.empty = empty
    assert await device.worked() == {}


async def test_samples_that_no_driver_took_change_nothing(device: Device) -> None:
    device.api.samples = [
        sample(9, 1 << 62, 100),
        sample(9, NOW_US, 50),
        sample(1 << 31, NOW_US, 100),
        sample(0, NOW_US, 100),
    ]
    assert await device.worked() == {9: 50}
    device.api.samples = [sample(9, NOW_US + 1, 70)]
    assert await device.worked() == {9: 70}, "what came after one from the future counts"


async def test_a_driver_that_has_the_newer_call_alone_is_asked_by_it(device: Device) -> None:
    device.api.error = pynvml.NVML_ERROR_NOT_SUPPORTED
    device.api.newer = [sample(5, NOW_US, 40)]
    assert await device.worked() == {5: 40}
    device.api.newer = pynvml.NVML_SUCCESS
    assert await device.worked() == {}


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
async def test_a_driver_that_does_not_tell_says_why(device: Device, error: int) -> None:
    device.api.error = error
    with pytest.raises(HeldUnknown, match="Not Supported" if error == 3 else "Unknown Error"):
        await device.worked()


async def test_work_of_an_mps_server_is_nobodys(device: Device, tmp_path: Path) -> None:
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "comm").write_text("nvidia-cuda-mps\n")
    device.api.samples = [sample(8, NOW_US, 40)]
    with pytest.raises(HeldUnknown, match="which client of an MPS server worked"):
        await device.worked()
