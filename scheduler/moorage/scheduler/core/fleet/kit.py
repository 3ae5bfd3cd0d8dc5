"""What a worker's hello says that it has, as far as placement reads it. Hosts with equal kits are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moorage.scheduler.core.ledger.inventory import Inventory
from moorage.schemas.capabilities import UNKNOWN, Capabilities, level_number, mode_enforced
from moorage.schemas.frames import OTHERS
from moorage.schemas.frames import Device as Described
from moorage.schemas.gpu import SHARING_MODES, capability_of

#: a device's index, vendor, name, memory in MiB, and compute capability (see `capability_of`)
Device = tuple[int, str, str, int, int]


class Rules(NamedTuple):
    """The rules for tenants in a worker's hello."""

    drivers: dict[str, frozenset[str]]  # the drivers allowed to each tenant; empty: any
    users: dict[str, int] | None  # host user by tenant, if only jobs of one user may share a GPU by mps


class Kit(NamedTuple):
    """Devices, drivers and rules of a host. A field here is all that it takes to tell hosts apart by it."""

    devices: tuple[Device, ...]
    #: sets of slots linked by NVLink, and by NUMA node; empty if neither separates any slots
    islands: tuple[tuple[int, ...], ...]
    links: tuple[int, ...]  # the sets of two or more slots that NVLink joins
    kept_for: tuple[tuple[str, ...], ...]  # by slot, the sharing modes that it is restricted to; empty: none
    slot_labels: tuple[tuple[tuple[str, str], ...], ...]  # by slot, the labels of its device; () if none has any
    drivers: frozenset[str]
    gpu_drivers: frozenset[str]  # drivers whose jobs may have GPUs
    user_drivers: frozenset[str]  # drivers whose jobs may run as any user
    call_drivers: frozenset[str]  # drivers whose jobs may answer the calls of a service
    freeze_drivers: frozenset[str]  # drivers whose jobs can be frozen
    sleep_drivers: frozenset[str]  # those, and drivers whose members sleep by a request of their own program
    reach_drivers: frozenset[str]  # drivers whose jobs may have its ports, and be looked at
    memory_limits: frozenset[str]  # drivers whose jobs are held to the memory that they ask for
    ports: int
    #: names of the only user that some driver's jobs may run as; empty if any driver may use any user
    own_user: tuple[str, ...]
    #: by driver and sharing mode, how well a job's part of memory and compute is enforced, as positions in `LEVELS`
    levels: tuple[tuple[tuple[str, str], tuple[int, int]], ...]
    modes: frozenset[str]
    sharers_max: tuple[tuple[str, int], ...]  # by mode
    drivers_for: tuple[tuple[str, frozenset[str]], ...]  # see `Rules`
    mps_users: tuple[tuple[str, int], ...] | None  # see `Rules`

    def permitted(self, tenant: str) -> frozenset[str]:
        """Return the drivers that the rules allow a tenant; empty for none, or if there are no rules: then all are."""
        rules = dict(self.drivers_for)
        return rules.get(tenant, rules.get(OTHERS, frozenset()))

    def lets_sleep(self, driver: str, *, by_request: bool) -> bool:
        """Return whether members of this driver sleep here: frozen, or `by_request` to their own program."""
        return driver in (self.sleep_drivers if by_request else self.freeze_drivers)

    def level(self, driver: str, mode: str) -> tuple[int, int]:
        """Return how well a job's part of memory and compute is enforced, as positions in `LEVELS`."""
        return dict(self.levels)[driver, mode]


def kit_of(has: Inventory, rules: Rules) -> Kit:
    """Return the kit of a worker by its inventory."""
    pool, drivers, told = has.gpu_pool, sorted(set(has.drivers)), has.capabilities

    def that(does: Callable[[Capabilities], bool]) -> frozenset[str]:
        return frozenset(name for name in drivers if does(told.get(name, UNKNOWN)))

    levels = []
    for driver in drivers:
        for mode in SHARING_MODES:
            enforced = mode_enforced(told, driver, mode)
            levels.append(((driver, mode), (level_number(enforced.memory), level_number(enforced.compute))))
    any_user = that(lambda can: can.users)
    return Kit(
        tuple(
            (each.index, each.vendor, each.name, each.memory_mib, capability_of(each.compute)) for each in pool
        ),
        _islands_of(pool),
        tuple(each for each in _linked(pool) if each.bit_count() > 1),
        tuple(tuple(device.modes) for device in pool),
        tuple(tuple(sorted(each.labels.items())) for each in pool) if any(each.labels for each in pool) else (),
        frozenset(drivers),
        that(lambda can: can.gpu_enabled),
        any_user,
        that(lambda can: can.answers_calls),
        that(lambda can: can.freezes),
        that(lambda can: can.freezes or can.sleeps_engines),
        that(lambda can: can.reaches),
        that(lambda can: can.memory_limit),
        has.ports,
        () if len(any_user) == len(drivers) else tuple(has.own_user),
        tuple(levels),
        # a worker may offer a mode in which its devices take no sharers
        frozenset(mode for mode in has.modes if has.sharers_max.get(mode, 1) != 0),
        tuple(sorted(has.sharers_max.items())),
        tuple(sorted(rules.drivers.items())),
        None if rules.users is None else tuple(sorted(rules.users.items())),
    )  # fmt: skip


def _islands_of(pool: Sequence[Described]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of slots linked by NVLink, and those of each NUMA node; empty if neither forms groups of slots.

    If NVLink links all slots or none, the NUMA nodes take the place of its sets.
    """
    nodes: dict[int, int] = {}
    for slot, device in enumerate(pool):
        nodes[device.numa] = nodes.get(device.numa, 0) | 1 << slot
    by_link, by_node = _linked(pool), tuple(nodes.values())
    if len(by_link) in (1, len(pool)):
        by_link = by_node
    return (by_link, by_node) if 1 < len(by_link) < len(pool) else ()


def _linked(pool: Sequence[Described]) -> tuple[int, ...]:
    """Return the sets of slots that NVLink joins; a slot without a link is a set of its own. A reported link counts in
    both directions.
    """
    slot_of = {device.index: slot for slot, device in enumerate(pool)}
    linked = [1 << slot for slot in range(len(pool))]
    for slot, device in enumerate(pool):
        for peer in device.peers:
            other = slot_of.get(peer, slot)
            both = linked[slot] | linked[other]
            for joined in range(len(pool)):
                if both >> joined & 1:
                    linked[joined] = both
    return tuple(dict.fromkeys(linked))
