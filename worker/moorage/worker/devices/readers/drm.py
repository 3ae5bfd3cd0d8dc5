"""Read AMD, Intel and other devices through their DRM render nodes: what exists, its state, and which processes use it.

The parts: `drm_cards` finds the devices in sysfs, `drm_clients` the processes that have them open. A kernel driver can
hang in a read of sysfs as NVML can, so every reading is made in a thread of its own (`threads`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.schemas.frames import Device
from moorage.system.daemon_threads import Question, in_thread
from moorage.worker.devices.readers.base import Host, Inventory, SlotReading, health_of, is_free
from moorage.worker.devices.readers.drm_cards import Card, find_cards, number, read
from moorage.worker.devices.readers.drm_clients import DrmClient, find_clients, holders, memory_mib

OPEN_TIMEOUT_S: Final = 30.0
SAMPLE_TIMEOUT_S: Final = 2.0
#: The scan of all processes is expensive: for this long its result serves every sample.
CLIENTS_AGE_S_MAX: Final = 5.0
#: The baseline of a device that was in use when first seen: the most that an idle one uses.
BASELINE_ASSUMED_MIB: Final = 1024
_MIB: Final = 1024 * 1024
#: errors of a device that is gone, of a file without a number, and of a driver that hangs
_NO_ANSWER: Final = (TimeoutError, OSError, ValueError)


class DrmUnavailable(RuntimeError):
    """Sysfs did not answer within the time limit: a driver hangs. `reason` says what was awaited."""

    def __init__(self, reason: str) -> None:
        self.reason: Final = reason
        super().__init__(f"the DRM devices of this host cannot be listed: {reason}")


@dataclass(frozen=True, slots=True)
class _Values:
    """One device's values from sysfs now; `vram_used_mib` is None if sysfs has none."""

    util_percent: int | None
    vram_used_mib: int | None
    temperature_c: int | None
    power_w: int | None
    power_limit_w: int | None
    uncorrected_errors: int


@dataclass(slots=True)
class _Slot:
    card: Card
    values: Question[_Values]
    baseline_mib: int = BASELINE_ASSUMED_MIB


class DrmInventory(Inventory):
    """The devices with a DRM render node; make it with `open_drm`. `faults` are those of `find_cards`."""

    def __init__(self, cards: Sequence[Card], faults: list[str], proc: Path, timeout_s: float) -> None:
        self._slots = [_Slot(card, _question(card, timeout_s)) for card in cards]
        self._clients: Question[list[DrmClient]] = Question("drm-clients", lambda: find_clients(proc), timeout_s)
        self._proc = proc
        self._seen: list[DrmClient] | None = None
        self._seen_s = 0.0
        self._closed = False
        self.faults = faults

    @classmethod
    async def open(cls, host: Host) -> Inventory:
        """Open all devices with a render node that no reader before has listed."""
        return await open_drm(root=host.root, listed=host.listed)

    def devices(self) -> list[Device]:
        return [slot.card.device for slot in self._slots]

    def nodes(self, slot: int) -> tuple[str, ...]:
        """Return the device's own files in /dev: a container needs them."""
        return tuple(f"/dev/dri/{name}" for name in sorted(self._slots[slot].card.nodes, reverse=True))

    def memory_baseline_mib(self, slot: int) -> int:
        """Return the baseline: `BASELINE_ASSUMED_MIB`, lowered by every reading without a process on the device."""
        return self._slots[slot].baseline_mib

    async def sample(self) -> list[SlotReading]:
        if not self._slots:
            return []  # without devices there is no need to scan the processes
        clients, values = await asyncio.gather(
            self._recent_clients(), asyncio.gather(*(self._values(slot) for slot in self._slots))
        )
        return [self._reading(slot, each, clients) for slot, each in zip(self._slots, values, strict=True)]

    async def memory_is_free(self, slot: int) -> bool:
        """Return whether the device is free, by the driver's count of used memory, else by its processes' memory."""
        found = self._slots[slot]
        if self._closed:
            return False
        try:
            values = await found.values.fresh_answer()
            clients = await self._fresh_clients() if values.vram_used_mib is None else None
        except _NO_ANSWER:
            return False
        used_mib = values.vram_used_mib
        if used_mib is None:
            used_mib = memory_mib(_clients_of(found.card, clients or []))
        return is_free(SlotReading(memory_used_mib=used_mib), found.baseline_mib)

    def close(self) -> None:
        """Make every later reading unresponsive. Nothing is open between calls, so there is nothing to release."""
        self._closed = True

    async def _values(self, slot: _Slot) -> _Values | None:
        if self._closed:
            return None
        try:
            return await slot.values.answer()
        except _NO_ANSWER:
            return None

    async def _recent_clients(self) -> list[DrmClient] | None:
        """Return the clients, at most `CLIENTS_AGE_S_MAX` old; None if /proc does not answer."""
        now = asyncio.get_running_loop().time()
        if self._seen is None or now - self._seen_s > CLIENTS_AGE_S_MAX:
            try:
                return await self._fresh_clients()
            except _NO_ANSWER:
                return None
        # drop processes that ended since: a wait for their end must not take until the next scan
        return [client for client in self._seen if (self._proc / str(client.pid)).exists()]

    async def _fresh_clients(self) -> list[DrmClient]:
        self._seen_s = asyncio.get_running_loop().time()
        self._seen = None
        self._seen = await self._clients.fresh_answer()
        return self._seen

    def _reading(self, slot: _Slot, values: _Values | None, clients: list[DrmClient] | None) -> SlotReading:
        if values is None:
            return SlotReading(health="unresponsive")
        own = _clients_of(slot.card, clients or [])
        used_mib = memory_mib(own) if values.vram_used_mib is None else values.vram_used_mib
        processes = holders(own)
        if clients is not None and not processes:
            slot.baseline_mib = min(slot.baseline_mib, used_mib)
        return SlotReading(
            util_percent=values.util_percent,
            memory_used_mib=used_mib,
            temperature_c=values.temperature_c,
            power_w=values.power_w,
            power_limit_w=values.power_limit_w,
            health=health_of(values.temperature_c, values.uncorrected_errors),
            uncorrected_errors=values.uncorrected_errors,
            processes=processes,
        )


async def open_drm(
    *,
    root: Path = Path("/"),
    listed: Container[str] = (),
    open_timeout_s: float = OPEN_TIMEOUT_S,
    sample_timeout_s: float = SAMPLE_TIMEOUT_S,
) -> DrmInventory:
    """Open all devices with a render node that are not `listed` by another inventory; none on a host without any.

    `root` is the root of `sys`, `dev` and the lists of names. `listed` are PCI addresses in the form of sysfs,
    `0000:03:00.0`. Raises DrmUnavailable if sysfs does not answer in time.
    """
    try:
        async with asyncio.timeout(open_timeout_s):
            cards, faults = await in_thread("drm-open", lambda: find_cards(root, listed))
    except TimeoutError:
        raise DrmUnavailable(f"no answer within {open_timeout_s:g} s") from None
    inventory = DrmInventory(cards, faults, root / "proc", sample_timeout_s)
    await inventory.sample()  # the first reading sets the baselines of unused devices
    return inventory


# ------------------------------------------------------------------------------------------------- in the thread


def _question(card: Card, timeout_s: float) -> Question[_Values]:
    return Question(f"drm-sample-{card.render_minor}", lambda: _read_values(card), timeout_s)


def _read_values(card: Card) -> _Values:
    """Return the values.

    Raises OSError if the device is gone, OSError or ValueError if its memory file cannot be read. A value without a
    file is None, or 0 for errors.
    """
    card.folder.stat()
    used_mib = None
    if card.vram_used is not None:
        used_mib = -(-_must(card.vram_used) // _MIB)
    elif card.vram_available is not None:
        used_mib = max(0, card.device.memory_mib - _must(card.vram_available) // _MIB)
    return _Values(
        _util_percent(card),
        used_mib,
        _temperature_c(card),
        _watts(card.power),
        _watts(card.power_limit),
        sum(_uncorrected(path) for path in card.errors),
    )


def _must(path: Path) -> int:
    return int(path.read_text())


def _util_percent(card: Card) -> int | None:
    """Return the driver's own figure, else the highest ratio of current to maximum frequency of a GT, in percent.

    None if the driver has neither.
    """
    if card.busy_percent is not None:
        busy = number(card.busy_percent)
        return None if busy is None else min(100, max(0, busy))
    ratios = [100 * (number(current) or 0) // (number(most) or 1) for current, most in card.frequencies if number(most)]
    return min(100, max(0, *ratios)) if ratios else None


def _temperature_c(card: Card) -> int | None:
    millidegrees = number(card.temperature) if card.temperature is not None else None
    return None if millidegrees is None else millidegrees // 1000


def _watts(path: Path | None) -> int | None:
    microwatts = number(path) if path is not None else None
    return None if microwatts is None or microwatts < 0 else microwatts // 1_000_000


def _uncorrected(path: Path) -> int:
    """Return a block's uncorrected errors since the driver was loaded: a line `ue: 3`."""
    for line in read(path).splitlines():
        word, _, count = line.partition(":")
        if word.strip() == "ue" and count.strip().isdigit():
            return int(count)
    return 0


def _clients_of(card: Card, clients: Sequence[DrmClient]) -> list[DrmClient]:
    """Return a card's clients: by PCI address, or by the device file's name if the driver reports no address."""
    return [
        client
        for client in clients
        if (client.address == card.address if client.address else client.node in card.nodes)
    ]
