"""Places requests with `prefer`: a sharer joins the fullest device, or gets the least used one.

Such requests bypass the scheduler's ranker, which weighs what is good for the fleet: a job that measures, or that
suffers from its neighbours, knows better.
"""

from __future__ import annotations

from typing import ClassVar

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.rank.ranker import Choice, Pack


class Preferring(Pack):
    """Chooses for shapes with `prefer`, which are all sharers. `pack` works as in Pack.

    With `spread`, the hosts with the fewest of the job's replicas come first.
    """

    name: ClassVar[str] = "prefer"

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        if shape.spread or shape.prefer == "pack":
            return super().choose(fleet, shape, avoid, excluded)
        return (
            self._best_fit(fleet, shape, excluded)
            or self._least_used(fleet, shape, excluded)
            or self._join_sharers(fleet, shape, excluded)  # some of several devices have to be shared
        )

    def _least_used(self, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> Choice | None:
        """Return a choice of the shared device with the fewest sharers; None if none has room.

        None, too, for a shape that asks for several devices.
        """
        best: Choice | None = None
        best_users = 0
        for cls, fit in fleet.capable(shape) if shape.count == 1 else ():
            for (num, slot), device in cls.shared_open[shape.mode].items():
                if (best is None or device.users < best_users) and fit.mask >> slot & 1 and num not in excluded:
                    host = cls.hosts[num]
                    if host.room_beside(slot, device, shape) and host.fits_host(shape):
                        best, best_users = Choice(host, 1 << slot), device.users
                        if best_users == 1:
                            return best  # no shared device has fewer
        return best

    def _slots_for(self, host: Host, shape: Shape) -> int | None:
        """Return the devices of a host with the most sharers, or the fewest; None if too few have room.

        Of equal ones, those with the least memory.
        """
        slots = host.slots_for(shape)
        if host.cls.pick(slots, shape) is None:
            return None
        users = {
            slot: host.shared[slot].users if slot in host.shared else 0
            for slot in range(slots.bit_length())
            if slots >> slot & 1
        }
        sign = -1 if shape.prefer == "pack" else 1
        devices = host.cls.devices
        taken = sorted(users, key=lambda slot: (sign * users[slot], devices[slot][3], slot))[: shape.count]
        return sum(1 << slot for slot in taken)
