"""Places in the draft: a replica, several replicas on one host, or a whole gang.

The ranker chooses among the hosts. A shape that found no room is not searched again in the same pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.records import PREEMPTIBLE, GangPhase
from moorage.scheduler.core.queue.limits import is_beyond
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import Group
from moorage.scheduler.core.rank.prefer import Preferring
from moorage.scheduler.core.rank.ranker import Choice, Ranker
from moorage.schemas.memo import Memo

#: how many groups can be skipped by their verdict in the time of one failed search
A_LOOK: Final = 8
#: how much `Ranker.work` takes as long as one choice
WORK_A_CHOICE: Final = 640
#: shapes with wishes of which it is known which hosts pass them
UNLIKES_MAX: Final = 256
_NO_PEERS: Final[dict[int, int]] = {}


class Placing:
    """Places jobs on one engine's fleet with one ranker."""

    def __init__(self, fleet: Fleet, order: QueueOrder, ranker: Ranker) -> None:
        self.ranker = ranker
        self.asks = ""  # what the ranker is asked now: it stays there if that raises
        self.num = -1  # the job being placed; -1 for none
        self.choices = 0  # successful choices in this pass
        self.in_vain = 0  # failed searches in this pass, see `cycle.IN_VAIN_MAX`
        self._preferring = Preferring()
        self._inventory = -1  # that of `_unlikes`
        #: by shape, the hosts that do not pass its wishes
        self._unlikes: Memo[int, tuple[frozenset[int], ...]] = Memo(UNLIKES_MAX)
        self._fleet = fleet
        self._order = order
        self._spread: dict[int, dict[int, int]] = {}  # this pass: job number -> its replicas by worker
        # this pass: shapes without room, with the hosts that were excluded
        self._no_room: set[tuple[int, frozenset[int]]] = set()

    def begin(self) -> None:
        """Reset what belongs to one pass."""
        self.choices = self.in_vain = 0
        self.num = -1
        self.ranker.work = 0
        self._spread.clear()
        self._no_room.clear()

    @property
    def spent(self) -> int:
        """The number of choices in this pass, with the ranker's other work converted into choices."""
        return self.choices + self.ranker.work // WORK_A_CHOICE

    def place(self, draft: Draft, shape: Shape, num: int, excluded: frozenset[int]) -> Choice | None:
        """Place the next replica of a job (of a gang, all) on hosts outside `excluded`. Return None without room.

        For a gang, the choice of its last replica is returned. Hosts on which the job failed to start come last.
        """
        self.num = num
        excluded |= self._order.kept_from(draft, num, shape) | shape.refusing | self._fleet.keeping_from(shape)
        failed = self._order.failed_of(num)
        choice = self._where_wished(draft, shape, num, excluded | failed) if shape.prefers else None
        if choice is None and failed:
            choice = self._where_allowed(draft, shape, num, excluded | failed)
        if choice is None:
            choice = self._where_allowed(draft, shape, num, excluded)
        self.num = -1
        return choice

    def _where_wished(self, draft: Draft, shape: Shape, num: int, excluded: frozenset[int]) -> Choice | None:
        """Return a choice on hosts that pass all wishes of a shape, or else all but its last ones; None for none."""
        for others in self._unlike(shape):
            choice = self._where_allowed(draft, shape, num, excluded | others)
            if choice is not None:
                return choice
        return None

    def _unlike(self, shape: Shape) -> tuple[frozenset[int], ...]:
        """Return the hosts that do not pass all wishes of a shape, all but its last, and so on to the first alone."""
        if self._inventory != self._fleet.inventory:
            self._inventory = self._fleet.inventory
            self._unlikes.clear()
        found = self._unlikes.get(shape.index)
        if found is None:
            hosts, rows = self._fleet.hosts.items(), list[frozenset[int]]()
            for count in range(len(shape.prefers), 0, -1):
                some = shape.prefers[:count]
                rows.append(
                    frozenset(num for num, host in hosts if not all(w.holds(host.labels.get(w.label)) for w in some))
                )
            found = self._unlikes.put(shape.index, tuple(rows))
        return found

    def _where_allowed(self, draft: Draft, shape: Shape, num: int, excluded: frozenset[int]) -> Choice | None:
        choice: Choice | None = None
        if (shape.index, excluded) not in self._no_room:
            if not shape.avoid:
                choice = self._look(draft, shape, num, excluded)
            else:
                with self._fleet.avoiding(shape.avoid):
                    choice = self._look(draft, shape, num, excluded)
        return choice

    def _look(self, draft: Draft, shape: Shape, num: int, excluded: frozenset[int]) -> Choice | None:
        if shape.is_gang:
            choice = self._place_gang(draft, shape, num, excluded)
        else:
            choice = self._place_one(draft, shape, num, excluded)
        if choice is None:
            self._no_room.add((shape.index, excluded))
            self.in_vain += A_LOOK
        else:
            self.choices += shape.together
        return choice

    def arrived(self, shape: Shape, replicas: int) -> None:
        """Let the ranker know of a job that arrived."""
        self.asks = "arrived"
        self.ranker.arrived(shape, replicas)
        self.asks = ""

    def prepare(self) -> bool:
        """Return whether the ranker is ready to choose."""
        self.asks = "prepare"
        is_ready = self.ranker.prepare(self._fleet)
        self.asks = ""
        return is_ready

    def _choose_by_data(self, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        """Return a choice that is as good as any other, if there is one on a host with most of what the job reads."""
        choice = self._choose(shape, avoid, excluded)
        if choice is None:
            return None
        data, tenant = self._order.data, self._order.state.jobs[self.num].tenant
        having: dict[int, list[int]] = {}
        for num, host in self._fleet.hosts.items():
            if count := len(data.on(host, shape, tenant)):
                having.setdefault(count, []).append(num)
        here, equal = len(data.on(choice.host, shape, tenant)), _standing(choice, shape, avoid)
        for count in sorted(having, reverse=True):
            if count <= here:
                break
            other = self._choose(shape, avoid, excluded | (self._fleet.hosts.keys() - having[count]))
            if other is not None and _standing(other, shape, avoid) == equal:
                return other
        return choice

    def _choose(self, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        if shape.prefer:
            return self._preferring.choose(self._fleet, shape, avoid, excluded)
        self.asks = "choose"
        choice = self.ranker.choose(self._fleet, shape, avoid, excluded)
        self.asks = ""
        return choice

    def _again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        if shape.prefer:
            return self._preferring.again(choice, shape, most)
        self.asks = "again"
        masks = self.ranker.again(choice, shape, most)
        self.asks = ""
        return masks

    def _place_one(self, draft: Draft, shape: Shape, num: int, excluded: frozenset[int]) -> Choice | None:
        avoid = self._peers(num, shape) if shape.spread else _NO_PEERS
        choice = (self._choose_by_data if shape.data else self._choose)(shape, avoid, excluded)
        if choice is None and (shape.preemptible or shape.sleeps):
            choice = self._where_frozen_wait(shape, num, excluded)
        if choice is not None:
            self._fleet.take(choice.host, shape, choice.mask)
            if shape.spread:
                self._count_peer(shape, avoid, choice.host.worker.num)
            number = choice.host.worker.num if shape.each_worker else self._order.queue.first(num)
            draft.placed(num, number, choice.host.worker.num, choice.mask, self._mode(shape, num))
        return choice

    def _mode(self, shape: Shape, num: int) -> int:
        mode, state = self._order.rates.mode(shape), self._order.state
        if shape.preemptible or (state.budgeted and is_beyond(state, state.jobs[num].tenant, shape)):
            return mode | PREEMPTIBLE
        return mode

    def _where_frozen_wait(self, shape: Shape, num: int, excluded: frozenset[int]) -> Choice | None:
        """Return a choice on devices that frozen jobs wait for, for a job that gives them back; None if none has room.

        Asked only after the ranker, which chooses devices that are open to all jobs, has found none.
        """
        for of, host in self._fleet.with_frozen.items():
            opened = host.guest_slots(shape)
            if not opened or of in excluded or not host.usable or not host.fits_host(shape):
                continue
            slots = host.cls.pick(opened & ~self._fleet.closed_turns(host, num), shape)
            if slots is not None:
                return Choice(host, slots)
        return None

    def place_more(
        self, draft: Draft, choice: Choice, shape: Shape, most: int, turns: Iterator[Group]
    ) -> tuple[int, Choice]:
        """Place at most `most` further replicas of a shape on the host just chosen, without a choice for each.

        Only replicas that the ranker would put there one by one. `turns` yields, before each one, the queue group whose
        first job it is of, until others come first. Return how many were placed, and the last choice.
        """
        host, order = choice.host, self._order
        taken, mode = 0, -1
        if choice.mask & host.awaited:
            return 0, choice  # no ranker has put it there
        if shape.avoid or shape.data or shape.counts or host.worker.window is not None or draft.avoided:
            return 0, choice  # other jobs of this shape may be excluded from this host
        if shape.each_worker:
            return 0, choice  # each has one there
        if order.has_failed(host.worker.num):
            return 0, choice  # those that failed to start on it come there last
        masks = self._again(choice, shape, min(most, draft.steps_left))
        self.choices += bool(masks)
        for mask, group in zip(masks, turns, strict=False):
            self.num = num = group.jobs[0]
            if mode < 0 or order.state.budgeted:  # of several tenants, some may have spent their budgets
                mode = self._mode(shape, num)
            draft.placed(num, order.queue.first(num), host.worker.num, mask, mode)
            order.queue.placed(group, num, draft.time_ms)
            taken += 1
        self.num = -1
        if taken:
            self._fleet.take_all(host, shape, masks[:taken])
            choice = Choice(host, masks[taken - 1])
        return taken, choice

    def _place_gang(self, draft: Draft, shape: Shape, num: int, excluded: frozenset[int]) -> Choice | None:
        most = self._order.most_ranks(num, shape) if shape.most else shape.together
        places = self._places(shape, most)
        taken = next((found for place in places if (found := self._take_all(place, most, excluded))), None)
        if taken is None:
            return None
        for index, (choice, asked) in enumerate(taken):
            draft.placed(num, index, choice.host.worker.num, choice.mask, self._order.rates.mode(asked))
        if shape.most > shape.together:
            draft.takes_ranks(draft.state.jobs[num], len(taken))
        draft.gang(draft.state.jobs[num], GangPhase.HOLDING)
        return taken[-1][0]

    def _places(self, shape: Shape, most: int) -> list[Shape]:
        """Return the places that a gang of at most `most` ranks may fit in, by an upper bound from the free counts:
        hopeless ones cost no search. The least that has room for all comes first, which leaves others to larger gangs.
        """
        places = self._fleet.places(shape)
        if shape.mode != EXCLUSIVE:
            return list(places)
        rooms = [(self._room(each), each) for each in places]
        rooms.sort(key=lambda row: (-min(row[0], most), row[0]))
        return [each for room, each in rooms if room >= shape.together and self._have_room(each)]

    def _room(self, shape: Shape) -> int:
        return sum(cls.rooms_at_most(shape) for cls, _ in self._fleet.capable(shape))

    def _have_room(self, shape: Shape) -> bool:
        """Return whether each group of a gang that has several may fit, by the same bound."""
        parts = [part.shape for part in shape.parts]
        return all(part.mode != EXCLUSIVE or self._room(part) >= part.together for part in parts)

    def _take_all(self, shape: Shape, most: int, excluded: frozenset[int]) -> list[tuple[Choice, Shape]] | None:
        """Take room for at most `most` ranks of a gang in one place, or for all of its groups; each with what it asks
        for. None, with all given back, if too few find any."""
        fleet, taken = self._fleet, list[tuple[Choice, Shape]]()
        for part in [each.shape for each in shape.parts] or [shape]:
            closed = excluded | part.refusing | fleet.keeping_from(part) if shape.parts else excluded
            closed |= fleet.lacking(part)  # the groups before it have taken some
            peers = dict[int, int]() if part.spread else _NO_PEERS
            for rank in range(part.together if shape.parts else most):
                choice = (self._choose_by_data if part.data else self._choose)(part, peers, closed)
                if choice is None and rank >= part.together:
                    break
                if choice is None:
                    before = fleet.changes
                    for done, asked in taken:  # undo this gang's own placements
                        fleet.give(done.host, asked, done.mask)
                    fleet.unchanged_since(before)  # verdicts still hold
                    return None
                fleet.take(choice.host, part, choice.mask)
                taken.append((choice, part))
                if part.spread:
                    self._count_peer(part, peers, choice.host.worker.num)
                if part.on_host_max == 1 or (part.counts and not choice.host.times(part, choice.host.counts_free)):
                    closed |= {choice.host.worker.num}
        return taken

    def _peers(self, num: int, shape: Shape) -> dict[int, int]:
        """Return the number of replicas of this job by worker number, including those placed in this pass.

        With `spread_over`, those on all hosts with that worker's value of the label.
        """
        used = self._spread.get(num)
        if used is None:
            used = self._spread[num] = {}
            job = self._order.state.jobs.get(num)
            for replica in job.rows.values() if job is not None else ():
                if replica.attempt is not None:
                    self._count_peer(shape, used, replica.attempt.worker.num)
        return used

    def _count_peer(self, shape: Shape, used: dict[int, int], worker: int) -> None:
        fleet, nums = self._fleet, [worker]
        if shape.spread_over is not None and worker in fleet.hosts:
            value = fleet.hosts[worker].labels.get(shape.spread_over)
            nums = nums if value is None else fleet.labelled[shape.spread_over][value]
        for num in nums:
            used[num] = used.get(num, 0) + 1


def _standing(choice: Choice, shape: Shape, avoid: dict[int, int]) -> tuple[int, ...]:
    """Return what choices are compared by for which the job's data decide: equal ones are as good for the fleet."""
    host, mask = choice.host, choice.mask
    users = sum(device.users for slot, device in host.shared.items() if mask >> slot & 1)
    devices = len(host.cls.devices)
    replicas = avoid.get(host.worker.num, 0)
    return host.cls.fit(shape).rank, choice.left, host.cls.memory_of(mask), users, devices, replicas
