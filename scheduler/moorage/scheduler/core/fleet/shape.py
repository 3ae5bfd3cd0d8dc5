"""Shapes: what a request asks of a host. Thousands of jobs share a few shapes.

The fleet's index, the queue and the reasons for waiting are kept by shape, so no decision reads the bytes of a request.
"""

from __future__ import annotations

from copy import copy
from typing import Final, NamedTuple

from moorage.scheduler.core.ledger.records import MODE_OF, Mode
from moorage.schemas.gpu import APPLE, GpuSpec, capability_of, mig_profile, model_matches, takes_part
from moorage.schemas.job import Request
from moorage.schemas.where import ANY, Condition, condition, wish

_ANY_NUMBER: Final = 1 << 30
#: the table is emptied when it has this many shapes
SHAPES_MAX: Final = 100_000
#: the table is also emptied when the words of its shapes take this many bytes: requests may have many or long words,
#: and refused requests have shapes too. It is computed from the words' lengths, so that a recording replays alike
WORD_BYTES_MAX: Final = 64 * 1024 * 1024
_WORD_BYTES: Final = 64
_CHAR_BYTES: Final = 4

ShapeKey = tuple[object, ...]
#: worker number and slot mask, as `state.Job.avoid` has them
Avoid = tuple[tuple[int, int], ...]
#: the fields that `Shape.device_rank` depends on
GpuKind = tuple[str, tuple[str, ...], int, int, str | None]
DeviceAsked = tuple[str, tuple[str, ...], int, int, int, int | None, bool, str | None]


class Place(NamedTuple):
    """The hosts with these values of some labels; None: without the label."""

    labels: tuple[str, ...]
    values: tuple[str | None, ...]

    def __str__(self) -> str:
        rows = list(zip(self.labels, self.values, strict=True))
        return ", ".join(f"{label}={value}" for label, value in rows if value is not None) or f"no {rows[-1][0]}"


class Part(NamedTuple):
    """A group of a gang: its name, its first rank, and what it asks for, with its size as `together`."""

    name: str
    first: int
    shape: Shape


class Shape:
    """What a replica asks for. `together` is the number of replicas to place at once: of a gang all, else 1.

    Of a gang that takes as many as have room it is the least number, and `most` the most; else that is 0.
    A gang of several groups has a shape for each (`parts`); its own is that of the group with the most GPUs, but that
    `gpus` and `ranks` count all of them. `on_host_max` is how many of them one host may take: 1 of a gang on distinct
    hosts.
    """

    __slots__ = (
        "answers_calls",
        "as_user",
        "avoid",
        "by_name",
        "compute_percent",
        "count",
        "counts",
        "cpu_milli",
        "data",
        "device_asked",
        "device_ids",
        "driver",
        "each_worker",
        "gpu_kind",
        "gpus",
        "index",
        "is_gang",
        "is_whole",
        "key",
        "levels",
        "linked",
        "memory_enforced",
        "memory_mib",
        "min_compute",
        "min_memory_mib",
        "mode",
        "models",
        "most",
        "must_sleep",
        "not_apple",
        "on_host_max",
        "parts",
        "paths",
        "place",
        "ports",
        "preemptible",
        "prefer",
        "prefers",
        "ranks",
        "reached",
        "refusing",
        "requires",
        "same",
        "share_mib",
        "sleeps",
        "sleeps_itself",
        "slice_profile",
        "slot_index",
        "spread",
        "spread_over",
        "tenant",
        "together",
        "user",
        "uses",
        "vendor",
        "where",
    )

    def __init__(self, key: ShapeKey, index: int, request: Request) -> None:
        gpu = request.effective_gpu
        self.avoid: Avoid = ()  # devices that failed under the job, or all devices of a worker that refused it
        self.refusing: frozenset[int] = frozenset()  # workers that refused the job, if it asks for no devices
        self.tenant = ""  # set only if some worker has rules for this tenant
        self.key = key
        self.index = index
        self.driver = request.workload.driver
        self.preemptible = request.preemptible  # it also takes devices that frozen attempts wait for
        self.answers_calls = request.service is not None or request.workload.calls
        self.sleeps = (
            request.sleeps
        )  # it also takes devices for which only attempts wait that sleep, in turns with them
        self.sleeps_itself = request.sleeps and request.service is not None and request.service.sleeps_itself
        self.must_sleep = request.sleeps and not request.ends_idle
        self.ports = request.run.ports if request.run else 0
        #: its worker gives it ports, or looks whether it is ready
        self.reached = self.ports > 0 or (request.run is not None and request.run.ready is not None)
        self.cpu_milli = request.resources.cpu_milli if request.resources else 0
        self.memory_mib = request.resources.memory_mib if request.resources else 0
        self.memory_enforced = request.resources is not None and request.resources.enforce == "hard"
        self.as_user = (request.run.user or "") if request.run else ""  # the user that it is to run as
        #: a tuple shares its words with the key; a set would take ten times as much memory
        self.requires = {name: tuple(sorted(values)) for name, values in request.requires.items()}
        self.where = tuple(map(condition, request.where))
        self.same = request.same_labels  # all of a gang's ranks are on hosts with one value of each: see `Places`
        self.place: Place | None = None  # the only hosts that it fits: a shape of `Places`
        if self.same and request.same:  # a host without a label that it names itself is in no place of it
            self.where += tuple(Condition(label, ANY, "") for label in request.same)
        #: it names labels or devices, in which hosts with equal hardware may differ
        self.by_name = bool(request.requires or self.where or (gpu and request.device_ids))
        self.prefers = tuple(map(wish, request.prefers))  # in their order
        self.data = tuple(sorted(request.run.data.items())) if request.run else ()  # a host that has it is preferred
        self.paths = frozenset(name for name, source in self.data if source.startswith("/"))  # only where they are
        self.uses = request.fleet_uses if request.uses else ()  # counters, which no host has
        self.counts = request.host_uses if request.uses else ()  # those that a host has
        self.count = gpu.count if gpu else 0
        self.models = gpu.models if gpu else ()
        self.vendor = gpu.effective_vendor if gpu else ""
        self.min_memory_mib = (gpu.min_memory_mib or 0) if gpu else 0
        self.min_compute = capability_of(gpu.min_compute_capability or "") if gpu else 0
        self.mode = int(MODE_OF[gpu.effective_sharing]) if gpu else int(Mode.NONE)
        share = gpu.share if gpu else None
        self.linked = gpu is not None and gpu.topology is not None  # its devices are joined by NVLink
        self.is_whole = self.mode <= Mode.EXCLUSIVE and not self.linked  # any whole devices will do
        self.share_mib = share.memory_mib if share else 0
        # 100 means no cap and is not counted: a share of memory alone leaves room for other sharers
        self.compute_percent = share.compute_percent if share and share.compute_percent < 100 else 0
        self.user = ""  # the host user that a sharer by mps asks for
        if self.mode == Mode.MPS:
            self.user = self.as_user
        self.prefer = gpu.prefer or "" if gpu and gpu.effective_sharing != "exclusive" else ""
        self.slot_index = gpu.time_slice_index if gpu else None
        # a mode belongs to Apple GPUs, which no driver supports
        self.not_apple = gpu is not None and gpu.mode is not None
        self.levels = gpu.levels_required if gpu else (0, 0)  # how well its share must be enforced, at least
        self.device_ids = request.device_ids if gpu else ()  # exactly the devices to use; empty: any matching ones
        #: its MIG slice; "" for any profile, None for whole devices only
        self.slice_profile = gpu.slice_profile if gpu else None
        #: ranking puts requests for as many GPUs of one kind into one class
        self.gpu_kind: GpuKind = (
            self.vendor, self.models, self.min_memory_mib, self.min_compute, self.slice_profile
        )  # fmt: skip
        self.device_asked: DeviceAsked = (
            self.vendor, self.models, self.min_memory_mib, self.share_mib, self.min_compute, self.slot_index,
            self.not_apple, self.slice_profile,
        )  # fmt: skip
        scheduling = gpu.effective_scheduling if gpu else "best-effort"
        self.spread = request.spreads or request.spread_over is not None
        self.spread_over = request.spread_over  # a label: its values count in place of hosts
        ranks = request.ranks
        self.is_gang = request.is_gang
        self.most = 0 if ranks is None else ranks.max
        self.together = ranks.min if ranks is not None else request.copies if scheduling == "gang" else 1
        self.on_host_max = 1 if gpu and gpu.distinct_hosts else _ANY_NUMBER
        self.gpus = self.count * self.together  # the number of GPUs that it takes at once
        self.ranks = self.together  # the number of replicas that it places at once
        self.parts: tuple[Part, ...] = ()
        self.each_worker = bool(request.each_worker)

    def of_rank(self, rank: int) -> Shape:
        """Return what this rank of a gang asks for."""
        for part in reversed(self.parts):
            if rank >= part.first:
                return part.shape
        return self

    def stay(self, request: Request) -> None:
        """Have it stay in one place as the whole gang, of which this is the shape of one group."""
        self.same = request.same_labels
        named = request.same if self.same and request.same else []
        self.where = (*map(condition, request.where), *(Condition(label, ANY, "") for label in named))
        self.by_name = bool(self.requires or self.where or self.device_ids)

    def at(self, place: Place) -> Shape:
        """Return this shape for the hosts of one place. It fits devices as this one, and has its index."""
        found = copy(self)
        found.same, found.place, found.by_name = (), place, True
        found.where += tuple(Condition(label, "=", value) for label, value in zip(*place, strict=True))
        if self.parts:
            found.parts = tuple(part._replace(shape=part.shape.at(place)) for part in self.parts)
        return found

    def device_rank(self, vendor: str, name: str, memory_mib: int, compute: int, index: int) -> int:
        """Return how well a device matches: 2 by a whole word or without a model, 1 inside a word, 0 not at all."""
        if self.vendor and vendor.lower() != self.vendor:
            return 0
        if self.not_apple and vendor.lower() == APPLE:
            return 0
        if memory_mib < self.min_memory_mib or memory_mib < self.share_mib or compute < self.min_compute:
            return 0
        if self.slot_index is not None and index != self.slot_index:
            return 0
        if not takes_part(self.slice_profile, mig_profile(name)):
            return 0
        if not self.models:
            return 2
        return max(model_matches(pattern, name) for pattern in self.models)


def shape_key(request: Request) -> ShapeKey:
    """Return a key for what a request asks of a host: every host gives the same answer to requests of equal keys."""
    gpu: GpuSpec | None = request.gpu if request.resource_requirements is None else request.effective_gpu
    run, resources, requires = request.run, request.resources, request.requires
    gpu_key: tuple[object, ...] | None = None
    if gpu is not None:
        model = gpu.model
        gpu_key = (
            gpu.count,
            tuple(model) if isinstance(model, list) else model,
            gpu.vendor,
            gpu.min_memory_mib,
            gpu.min_compute_capability,
            gpu.sharing,
            gpu.share and (gpu.share.memory_mib, gpu.share.compute_percent),
            gpu.scheduling,
            gpu.time_slice_index,
            (str(request.ranks) if request.ranks else request.copies) if gpu.scheduling == "gang" else 0,
            gpu.distinct_hosts,
            request.device_ids,
            gpu.mode,
            gpu.prefer,
            gpu.enforce and gpu.levels_required,
            gpu.profile,
            gpu.topology,
        )
    groups = tuple(shape_key(request.of_group(at)) for at in range(len(request.groups))) if request.groups else ()
    return (
        *groups,
        gpu_key,
        resources and (resources.cpu_milli, resources.memory_mib, resources.enforce),
        tuple((name, *sorted(values)) for name, values in sorted(requires.items())) if requires else None,
        run.driver if run else "",
        run.user if run else None,
        request.preemptible,
        # None without a service
        request.service and (request.spreads, request.sleeps and 1 + request.service.sleeps_itself, request.ends_idle),
        run is not None and run.calls,
        (run.ports, run.ready is not None) if run and (run.ports or run.ready is not None) else None,
        tuple(sorted(request.where)) if request.where else None,
        tuple(sorted(request.uses.items())) if request.uses else None,
        tuple(request.prefers) if request.prefers else None,
        tuple(sorted(run.data.items())) if run is not None and run.data else None,
        None
        if request.same is None and request.spread_over is None
        else (None if request.same is None else tuple(request.same), request.spread_over),
        bool(request.each_worker),
    )


class Shapes:
    """The table of shapes, by key. It is emptied at its bounds."""

    def __init__(self) -> None:
        self._by_key: dict[ShapeKey, Shape] = {}
        self._word_bytes = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def of(self, request: Request) -> Shape:
        """Return the Shape of this request: the same for equal keys, until the table is emptied at its bounds.

        Shapes in use remain valid then.
        """
        key = shape_key(request)
        shape = self._by_key.get(key)
        if shape is None:
            shape = self._made(key, request)
        return shape

    def _made(self, key: ShapeKey, request: Request) -> Shape:
        """Return a new shape, with those of its groups."""
        groups = request.groups
        if not groups:
            return self._kept(Shape(key, self._next, request))
        asked = [request.of_group(at) for at in range(len(groups))]
        parts, first = list[Part](), 0
        for at, one in enumerate(asked):
            shape = self._kept(Shape((*key, "group", at), self._next, one))
            shape.together = shape.ranks = groups[at].replicas
            shape.is_gang, shape.gpus = True, shape.count * shape.together
            parts.append(Part(groups[at].name, first, shape))
            first += shape.together
        largest = max(range(len(asked)), key=lambda at: (parts[at].shape.gpus, -at))
        whole = self._kept(Shape(key, self._next, asked[largest]))
        for each in (whole, *(part.shape for part in parts)):
            each.stay(request)
        whole.parts, whole.ranks = tuple(parts), first
        whole.is_gang, whole.together = True, parts[largest].shape.together
        whole.gpus = sum(part.shape.gpus for part in parts)
        return whole

    def avoiding(self, shape: Shape, avoid: Avoid, request: Request) -> Shape:
        """Return this request's shape with devices to avoid; such jobs wait in a queue group of their own."""
        key = (*shape.key, avoid)
        found = self._by_key.get(key)
        if found is None:
            found = self._made(key, request)
            for each in (found, *(part.shape for part in found.parts)):
                each.tenant = shape.tenant
                if each.count:
                    each.avoid = avoid
                else:
                    each.refusing = frozenset(num for num, _ in avoid)
        return found

    def asked_by(self, shape: Shape, tenant: str, request: Request) -> Shape:
        """Return this request's shape for a tenant that a worker's rules name; its jobs have groups of their own."""
        key = (*shape.key, tenant)
        found = self._by_key.get(key)
        if found is None:
            found = self._made(key, request)
            for each in (found, *(part.shape for part in found.parts)):
                each.avoid, each.refusing, each.tenant = shape.avoid, shape.refusing, tenant
        return found

    def _kept(self, shape: Shape) -> Shape:
        more = _word_bytes(shape)
        if len(self._by_key) >= SHAPES_MAX or self._word_bytes + more > WORD_BYTES_MAX:
            self._by_key.clear()
            self._word_bytes = 0
        self._by_key[shape.key] = shape
        self._word_bytes += more
        self._next += 1
        return shape


def _word_bytes(shape: Shape) -> int:
    labels = [word for name, values in shape.requires.items() for word in (name, *values)]
    labels += [word for each in shape.where for word in each if word is not None]
    labels += [name for name, _ in (*shape.uses, *shape.counts)]
    labels += [word for each in shape.data for word in each]
    words = (shape.driver, shape.as_user, shape.vendor, *shape.models, *shape.device_ids, *labels)
    return _WORD_BYTES * len(words) + _CHAR_BYTES * sum(map(len, words))
