"""Checks that no device is lent by two workers.

If two agents lent one GPU, it would be given away twice, each time by its own slot, and the ledger could not tell. For
example, two containers may see the same GPU, or a machine may join under a new name while the old name holds leases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.state import State, Worker
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Hello
from moorage.schemas.hello_check import DeviceName, devices_of

#: the least characters of a worldwide unique device name: NVML and ROCm give `GPU-` or `MIG-` and at least 16 hex
#: digits; a card without a serial number is named by its PCI address, which occurs in every machine
OWN_NAME_CHARS_MIN: Final = 16
#: the table of lenders is read again from the state once it has twice as many devices as at the last reading, plus
#: this; so workers that rejoin with other devices leave nothing behind
LENDERS_SPARE: Final = 4_096


class Lending:
    """Knows which worker lends a device. `kept` returns whether jobs wait for a lost worker's machine to return."""

    def __init__(self, state: State, kept: Callable[[Worker], bool], spare: int = LENDERS_SPARE) -> None:
        self._state = state
        self._kept = kept
        self._spare = spare
        self._lenders: dict[DeviceName, int] | None = None  # the last lender by worker number; None: not read yet
        self._lenders_max = 0
        self._draft: Draft | None = None
        self._joining: dict[DeviceName, str] = {}  # worker ids of this draft's joins

    def joined(self, worker: Worker) -> None:
        """Note, after the fold, that a worker lends the devices in its hello."""
        if self._lenders is not None:
            self._lenders.update(dict.fromkeys(_lent_by(worker), worker.num))
            if len(self._lenders) > self._lenders_max:
                self._lenders = None

    def check(self, draft: Draft, worker_id: str, hello: Hello, retry_after_s: float) -> Problem | None:
        """Return a problem if another worker lends one of the devices; else note them as joining in this draft.

        Only devices that the hello lends, and whose names are unique in the world, are checked.
        """
        if draft is not self._draft:
            self._draft, self._joining = draft, {}
        devices = devices_of(hello)
        names = _lent(devices, hello.lent_slots)
        for name in names:
            other = self._joining.get(name) or self._lender(name, worker_id)
            if other in (None, worker_id):
                continue
            return problem(
                "gpu-lent-twice",
                f"worker {other} lends this GPU until it says goodbye or is lost, and its kept jobs are over",
                field=f"$.hello.gpu_pool[{devices.index(name)}].uuid",
                found=name.uuid,
                allowed="a GPU that no other worker lends",
                next=f"stop one of the two agents, or let each see GPUs of its own; wait if {other} was this machine",
                retry_after_s=retry_after_s,
            )
        self._joining.update(dict.fromkeys(names, worker_id))
        return None

    def _lender(self, name: DeviceName, worker_id: str) -> str | None:
        """Return the id of another worker that lends a device and may still run something on it; None for none."""
        workers = self._state.worker_by_num
        if self._lenders is None:
            self._lenders = {}
            for worker in workers.values():
                if worker.session or self._kept(worker):
                    self._lenders.update(dict.fromkeys(_lent_by(worker), worker.num))
            self._lenders_max = 2 * len(self._lenders) + self._spare
        lender = workers.get(self._lenders.get(name, -1))
        if lender is None or lender.id == worker_id:
            return None
        holds = lender.session or self._kept(lender)
        return lender.id if holds and name in _lent_by(lender) else None


def recorded_devices(worker: Worker) -> list[DeviceName]:
    """Return the devices in a worker's last hello, by slot."""
    return [DeviceName(device.vendor, device.uuid) for device in worker.inventory.gpu_pool]


def _lent_by(worker: Worker) -> list[DeviceName]:
    """Return the devices that a worker lends, and those it no longer lends but on which attempts still run."""
    held = 0
    for attempt in worker.attempts.values():
        held |= attempt.home
    return _lent(recorded_devices(worker), worker.inventory.lent_slots, held)


def _lent(devices: list[DeviceName], lent: list[int] | None, held: int = 0) -> list[DeviceName]:
    """Return the lent devices, and those in the mask `held`, whose names are unique in the world.

    `lent` None stands for all devices.
    """
    return [
        name
        for slot, name in enumerate(devices)
        if len(name.uuid) >= OWN_NAME_CHARS_MIN and (lent is None or slot in lent or held >> slot & 1)
    ]
