"""AMD, Intel and other devices by their DRM render nodes: what is there, how it is, and who holds it.

The parts: `drm_cards` finds the devices in sysfs, `drm_clients` the processes that have them open. A kernel driver can
hang in a read of sysfs as NVML can, so every look is a question in a thread of its own (`threads`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.schemas.frames import Device
from moorage.worker.inventory.base import HeldUnknown, ReportFault, SlotReading, health_of, is_free
from moorage.worker.inventory.drm_cards import Card, find_cards, number, read
from moorage.worker.inventory.drm_clients import DrmClient, find_clients, holders, memory_mib
from moorage.worker.inventory.threads import Question, in_thread

OPEN_TIMEOUT_S: Final = 30.0
SAMPLE_TIMEOUT_S: Final = 2.0
#: The walk over all processes is the dear part: between two of them its answer serves every sample.
CLIENTS_AGE_S_MAX: Final = 5.0
#: The baseline of a device that was in use when first seen: what an idle one uses at most.
BASELINE_ASSUMED_MIB: Final = 1024
_MIB: Final = 1024 * 1024
#: a device that is gone, a file of it that holds no number any more, or a driver that hangs
_NO_ANSWER: Final = (TimeoutError, OSError, ValueError)


class DrmUnavailable(RuntimeError):
    """Sysfs did not answer within the time limit: a driver hangs. `reason` is what was waited for."""

    def __init__(self, reason: str) -> None:
        self.reason: Final = reason
        super().__init__(f"the DRM devices of this host cannot be listed: {reason}")


@dataclass(frozen=True, slots=True)
class _Values:
    """What sysfs tells of one device now; `vram_used_mib` None where it does not tell."""

    util_percent: int | None
    vram_used_mib: int | None
    temperature_c: int | None
    uncorrected_errors: int


@dataclass(slots=True)
class _Slot:
    card: Card
    values: Question[_Values]
    baseline_mib: int = BASELINE_ASSUMED_MIB


class DrmInventory:
    """Build it with `open_drm`. `faults` tells of nodes that are no slots, and why."""

    simulated = False

    def __init__(self, cards: Sequence[Card], faults: list[str], proc: Path, timeout_s: float) -> None:
        self._slots = [_Slot(card, _question(card, timeout_s)) for card in cards]
        self._clients: Question[list[DrmClient]] = Question("drm-clients", lambda: find_clients(proc), timeout_s)
        self._proc = proc
        self._seen: list[DrmClient] | None = None
        self._seen_s = 0.0
        self._closed = False
        self.faults: Final = faults

    def devices(self) -> list[Device]:
        return [slot.card.device for slot in self._slots]

    def nodes(self, slot: int) -> tuple[str, ...]:
        """Return the device's own files in /dev: what a container must be given."""
        return tuple(f"/dev/dri/{name}" for name in sorted(self._slots[slot].card.nodes, reverse=True))

    def memory_baseline_mib(self, slot: int) -> int:
        """Recorded when opened, and lowered by every later reading of the device without a process on it."""
        return self._slots[slot].baseline_mib

    async def sample(self) -> list[SlotReading]:
        if not self._slots:
            return []  # nobody can hold a device that is not there: no walk over the processes
        clients, values = await asyncio.gather(
            self._recent_clients(), asyncio.gather(*(self._values(slot) for slot in self._slots))
        )
        return [self._reading(slot, each, clients) for slot, each in zip(self._slots, values, strict=True)]

    async def memory_is_free(self, slot: int) -> bool:
        """By what the driver counts; where it counts nothing, by what the processes that have it open say they hold."""
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

    async def held(self, slot: int) -> dict[int, int]:
        raise HeldUnknown("only NVIDIA's driver tells what processes hold of a GPU")

    def watch(self, report: ReportFault) -> None:
        """These drivers say nothing by themselves that this one listens to: the readings tell."""

    def close(self) -> None:
        """Nothing is open between two questions; afterwards every device counts as unresponsive."""
        self._closed = True

    async def _values(self, slot: _Slot) -> _Values | None:
        if self._closed:
            return None
        try:
            return await slot.values.answer()
        except _NO_ANSWER:
            return None

    async def _recent_clients(self) -> list[DrmClient] | None:
        """Those seen at most `CLIENTS_AGE_S_MAX` ago; None where /proc does not answer."""
        now = asyncio.get_running_loop().time()
        if self._seen is None or now - self._seen_s > CLIENTS_AGE_S_MAX:
            try:
                return await self._fresh_clients()
            except _NO_ANSWER:
                return None
        # a process that ended since then holds nothing, and whoever waits for that must not wait for the next walk
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
            health=health_of(values.temperature_c, values.uncorrected_errors),
            uncorrected_errors=values.uncorrected_errors,
            processes=processes,
        )


async def open_drm(
    *,
    root: Path = Path("/"),
    proc: Path | None = None,
    listed: Container[str] = (),
    open_timeout_s: float = OPEN_TIMEOUT_S,
    sample_timeout_s: float = SAMPLE_TIMEOUT_S,
) -> DrmInventory:
    """All devices with a render node that are not `listed` by another inventory; none on a host without any.

    `root` is where `sys`, `dev` and the lists of names are looked for; `proc` is `root/proc` unless given. `listed` are
    PCI addresses as sysfs spells them, `0000:03:00.0`. Raises DrmUnavailable where sysfs does not answer in time.
    """
    try:
        async with asyncio.timeout(open_timeout_s):
            cards, faults = await in_thread("drm-open", lambda: find_cards(root, listed))
    except TimeoutError:
        raise DrmUnavailable(f"no answer within {open_timeout_s:g} s") from None
    inventory = DrmInventory(cards, faults, root / "proc" if proc is None else proc, sample_timeout_s)
    await inventory.sample()  # the first look sets the baselines of the devices that nobody uses
    return inventory


# ------------------------------------------------------------------------------------------------- in the thread


def _question(card: Card, timeout_s: float) -> Question[_Values]:
    return Question(f"drm-sample-{card.render_minor}", lambda: _read_values(card), timeout_s)


def _read_values(card: Card) -> _Values:
    """Raises OSError or ValueError where the device is gone or tells its memory no more; the rest has defaults."""
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
        sum(_uncorrected(path) for path in card.errors),
    )


def _must(path: Path) -> int:
    return int(path.read_text())


def _util_percent(card: Card) -> int | None:
    """The driver's own figure, else the current frequency in percent of the highest, of the busiest GT."""
    if card.busy_percent is not None:
        busy = number(card.busy_percent)
        return None if busy is None else min(100, max(0, busy))
    ratios = [100 * (number(current) or 0) // (number(most) or 1) for current, most in card.frequencies if number(most)]
    return min(100, max(0, *ratios)) if ratios else None


def _temperature_c(card: Card) -> int | None:
    millidegrees = number(card.temperature) if card.temperature is not None else None
    return None if millidegrees is None else millidegrees // 1000


def _uncorrected(path: Path) -> int:
    """A block's uncorrected errors since the driver was loaded: a line `ue: 3`."""
    for line in read(path).splitlines():
        word, _, count = line.partition(":")
        if word.strip() == "ue" and count.strip().isdigit():
            return int(count)
    return 0


def _clients_of(card: Card, clients: Sequence[DrmClient]) -> list[DrmClient]:
    """By PCI address; by the device file's name where the driver tells none."""
    return [
        client
        for client in clients
        if (client.address == card.address if client.address else client.node in card.nodes)
    ]
