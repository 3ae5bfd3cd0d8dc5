"""Notice that the kernel keeps a running job from its own GPU.

That happens to containers whose GPUs NVIDIA's hook has added without the engine's knowledge: `systemctl daemon-reload`
writes the devices of a container's cgroup anew, without the GPU. What the job has open goes on; what it opens from then
on fails, which NVML reports as "Unknown Error". Nothing else shows it: the GPU is well, and the job runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.frames import Output
from moorage.system.device_fence import is_refused
from moorage.worker.devices.device_watch import DeviceWatch
from moorage.worker.devices.readers.base import Inventory
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Attempt

#: seconds between two looks, and the most attempts that one look tries
LOOK_S: Final = 30.0
ATTEMPTS_MAX: Final = 64
CUT_OFF: Final = "the kernel refuses a running job its own GPU, as after a daemon-reload of systemd"
NOTE: Final = (
    "warning[cut-off]: the kernel refuses this job its own GPU, as after a daemon-reload of systemd on the host: what"
    " it opens from now on fails (NVML: Unknown Error); run the job again"
)

log = logging.getLogger("moorage.worker")


class CutOffWatch:
    """Tries, for each running attempt with a GPU, whether its cgroup may open the GPU's file in /dev.

    `watch` gets the warnings, and `publish` a note for clients that follow the attempt. It takes root; without it
    nothing is seen.
    """

    def __init__(
        self,
        inventory: Inventory,
        drivers: Mapping[str, Driver],
        held: Mapping[AttemptName, Attempt],
        watch: DeviceWatch,
        publish: Callable[[AttemptName, bytes], None],
    ) -> None:
        self._inventory = inventory
        self._drivers = drivers
        self._held = held
        self._watch = watch
        self._publish = publish
        self._told: set[AttemptName] = set()

    async def run(self) -> None:
        """Look every `LOOK_S` seconds; return at once where it can see nothing."""
        if os.geteuid() != 0 or self._inventory.simulated or not self._inventory.devices():
            return
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # a defect of moorage: the next look may succeed
                log.exception("it could not be seen whether jobs reach their GPUs")

    async def look(self) -> None:
        """Try once; set the warnings of the watch to what is seen."""
        running = {
            name: attempt for name, attempt in self._held.items() if attempt.phase == "running" and attempt.slots
        }
        self._told &= running.keys()
        found: dict[int, str] = {}
        for name, pid in islice(self._pids(running).items(), ATTEMPTS_MAX):
            slots = [slot for slot in running[name].slots if await self._is_refused(pid, slot)]
            if not slots or name not in self._held:  # it may have ended meanwhile, with its cgroup
                continue
            found |= dict.fromkeys(slots, f"cut-off: {CUT_OFF}")
            if name not in self._told:
                self._told.add(name)
                log.error("job %s of tenant %s: %s", name[1], name[0], CUT_OFF)
                self._publish(name, encode(Output(name[3], "err", 0, "", note=NOTE)))
        self._watch.cut_off = found

    def _pids(self, running: Mapping[AttemptName, Attempt]) -> dict[AttemptName, int]:
        """Return one process of each of these attempts whose driver can tell its processes."""
        found: dict[AttemptName, int] = {}
        names = {attempt.driver for attempt in running.values()}
        drivers = [self._drivers[name] for name in names if not self._drivers[name].is_foreign]
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()] if drivers else []
        for driver in drivers:
            for pid, owner in driver.attempts_of(pids).items():
                if owner is not None and owner in running:
                    found.setdefault(owner, pid)
        return found

    async def _is_refused(self, pid: int, slot: int) -> bool:
        nodes = self._inventory.nodes(slot)
        return bool(nodes) and await is_refused(pid, nodes[0])
