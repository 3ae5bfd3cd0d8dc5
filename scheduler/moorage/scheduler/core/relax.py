"""The smallest changes to a request with which it would start now, each tried on the fleet as it is.

Only what is tried is told: a change counts when hosts that are open to this request hold what it asks for then. The
order is that of what a user gives up least for: another model, less memory, a share of a GPU, fewer cores, no gang,
fewer replicas, fewer GPUs, a label less. Where no single change helps, two at a time are tried. Bounded by
`TRIALS_MAX`; nothing is changed by it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from moorage.scheduler.core.fleet import EXCLUSIVE, Fleet, Host
from moorage.scheduler.core.shape import Shape
from moorage.schemas.gpu import format_token, model_matches
from moorage.schemas.job import Request, Resources

#: fixes that are told, the ones that change least first
FIXES_MAX: Final = 3
#: changed requests that are tried for one answer: some 5 to 50 µs each
TRIALS_MAX: Final = 200
#: models of the fleet that are tried
MODELS_TRIED_MAX: Final = 16
_MIB_PER_GIB: Final = 1024
_MODEL_WORD: Final = re.compile(r"(?=[^ ]*\d)[A-Za-z][A-Za-z0-9]*")


class Fix(NamedTuple):
    """One change. `fields` are the fields of the request that take the place of those sent."""

    say: str
    request: Request
    fields: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """As `explain` tells it: what to change, the new fields, and the GPUs as a token where they change."""
        request = msgspec.to_builtins(self.request)
        data: dict[str, Any] = {"say": self.say, "request": {name: request.get(name) for name in self.fields}}
        if {"gpu", "replicas"} & set(self.fields):
            data["gpu"] = format_token(self.request.effective_gpu, self.request.replicas)
        return data


def starts_now(fleet: Fleet, shape: Shape, barred: frozenset[int]) -> bool:
    """Whether hosts that are open to it hold a replica of this shape now, of a gang all of them."""
    missing = shape.together
    for cls, _ in fleet.capable(shape):
        for bucket in cls.buckets[shape.count if shape.mode == EXCLUSIVE else 0 :]:
            for num, host in bucket.items():
                if num not in barred:
                    missing -= surely(host, shape)
                    if missing <= 0:
                        return True
    return False


def surely(host: Host, shape: Shape) -> int:
    """Replicas that a usable host holds now; of sharers on several devices each one at most, as they may overlap."""
    found = host.replicas_of(shape, "now")
    return min(found, 1) if shape.mode > EXCLUSIVE and shape.count > 1 else found


class Relaxer:
    """Tries changes of one request. `shape_of` gives the shape of one as its tenant asks for it, and `may` says
    whether that tenant may lease what it asks for."""

    def __init__(
        self,
        fleet: Fleet,
        shape_of: Callable[[Request], Shape],
        request: Request,
        barred: frozenset[int],
        may: Callable[[Shape], bool],
    ) -> None:
        self._fleet = fleet
        self._shape_of = shape_of
        self._request = request
        self._barred = barred
        self._may = may
        self.trials = 0

    def fixes(self) -> list[Fix]:
        """At most `FIXES_MAX`, of each kind the one that changes least."""
        return self._singles() or list(itertools.islice(self._pairs(), FIXES_MAX))

    def starts(self, request: Request) -> bool:
        if self.trials >= TRIALS_MAX:
            return False
        self.trials += 1
        shape = self._shape_of(request)
        return self._may(shape) and starts_now(self._fleet, shape, self._barred)

    def _singles(self) -> list[Fix]:
        """The first change of each kind that lets the request start."""
        found: list[Fix] = []
        for kind in _KINDS:
            if len(found) == FIXES_MAX:
                break
            for say, changed, name in kind(self._fleet, self._request):
                if self.starts(changed):
                    found.append(Fix(say, changed, (name,)))
                    break
        return found

    def _pairs(self) -> Iterator[Fix]:
        """Two kinds of change at once; of each first kind its gentlest and its strongest one."""
        seen: set[bytes] = set()
        for at, kind in enumerate(_KINDS):
            first = list(kind(self._fleet, self._request))
            for say, changed, name in [*first[:1], *first[1:][-1:]]:
                for other in _KINDS[at + 1 :]:
                    for more, both, second in other(self._fleet, changed):
                        key = msgspec.msgpack.encode(both)
                        if key not in seen and self.starts(both):
                            seen.add(key)
                            yield Fix(f"{say}, {more}", both, tuple(dict.fromkeys((name, second))))
                            break


_Change = tuple[str, Request, str]


def _with_gpu(request: Request, **fields: Any) -> Request:
    gpu = request.effective_gpu
    assert gpu is not None
    return msgspec.structs.replace(request, gpu=msgspec.structs.replace(gpu, **fields), resource_requirements=None)


def _devices(fleet: Fleet) -> dict[str, int]:
    """Device names of the fleet with their memory in MiB, in the order of joining."""
    found: dict[str, int] = {}
    for cls in fleet.classes.values():
        for _, _, name, memory_mib in cls.devices:
            found[name] = max(found.get(name, 0), memory_mib)
    return found


def short_name(device: str) -> str:
    """What one would write of a device's name: `H100` of `NVIDIA H100 80GB HBM3`; the name itself where none stands."""
    found = _MODEL_WORD.search(device)
    return found[0] if found is not None else device[:64]


def _models(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is None or not gpu.models:
        return
    tried = set()
    for name in list(_devices(fleet))[:MODELS_TRIED_MAX]:
        short = short_name(name)
        if short in tried or any(model_matches(model, name) for model in gpu.models):
            continue
        tried.add(short)
        yield f"accept {short} too", _with_gpu(request, model=[*gpu.models, short]), "gpu"


def _vendor(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is not None and gpu.effective_vendor:
        yield "accept any vendor", _with_gpu(request, vendor=""), "gpu"


def _memory(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """The memory of each kind of device that has less than asked, the largest first."""
    gpu = request.effective_gpu
    if gpu is None or not gpu.min_memory_mib:
        return
    for memory_mib in sorted(set(_devices(fleet).values()), reverse=True):
        if 0 < memory_mib < gpu.min_memory_mib:
            say = f"{_gib(memory_mib)} GiB instead of {_gib(gpu.min_memory_mib)} GiB"
            yield say, _with_gpu(request, min_memory_mib=memory_mib), "gpu"


def _gib(mib: int) -> str:
    return f"{mib / _MIB_PER_GIB:.1f}".removesuffix(".0")


def _share(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """A share of a GPU instead of a whole one; of the part that is asked for, less; a whole one instead of a share."""
    gpu = request.effective_gpu
    if gpu is None:
        return
    if gpu.effective_sharing == "exclusive":
        yield "mode mps", _with_gpu(request, sharing="mps"), "gpu"
        yield "mode time-slice", _with_gpu(request, sharing="time-slice"), "gpu"
        return
    if gpu.share is not None:
        for percent in (75, 50, 25, 10):
            if percent < gpu.share.compute_percent < 100:
                share = msgspec.structs.replace(gpu.share, compute_percent=percent)
                say = f"{percent} % of a GPU instead of {gpu.share.compute_percent} %"
                yield say, _with_gpu(request, share=share), "gpu"
    if gpu.time_slice_index is None:
        yield "a whole GPU", _with_gpu(request, sharing=None, share=None), "gpu"


def _host(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """What the host with most left has of processors and of memory."""
    asked = request.resources
    if asked is None:
        return
    usable = [host for host in fleet.hosts.values() if host.usable]
    cpu = max((host.cpu_free for host in usable if host.open or request.effective_gpu is None), default=0)
    memory = max((host.memory_free for host in usable if host.open or request.effective_gpu is None), default=0)
    cores, gib = cpu // 1000 * 1000 or cpu, memory // _MIB_PER_GIB * _MIB_PER_GIB or memory
    less_cpu, less_memory = 0 < cores < asked.cpu_milli, 0 < gib < asked.memory_mib
    if less_cpu:
        say = f"{cores / 1000:g} cores instead of {asked.cpu_milli / 1000:g}"
        yield say, msgspec.structs.replace(request, resources=Resources(cores, asked.memory_mib)), "resources"
    if less_memory:
        say = f"{_gib(gib)} GiB of host memory instead of {_gib(asked.memory_mib)}"
        yield say, msgspec.structs.replace(request, resources=Resources(asked.cpu_milli, gib)), "resources"


def _gang(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is not None and gpu.effective_scheduling == "gang" and request.replicas > 1:
        yield "best effort: what fits starts now, the rest later", _with_gpu(request, scheduling=None), "gpu"


def _replicas(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Of a gang, fewer replicas, the most first."""
    gpu = request.effective_gpu
    if gpu is None or gpu.effective_scheduling != "gang":
        return
    counts = [*range(request.replicas - 1, max(0, request.replicas - 9), -1)]
    while counts and counts[-1] > 1:
        counts.append(counts[-1] // 2)
    for replicas in counts:
        changed = msgspec.structs.replace(request, replicas=replicas)
        yield f"{replicas} replica{'s' * (replicas > 1)} instead of {request.replicas}", changed, "replicas"


def _count(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is None:
        return
    for count in range(gpu.count - 1, 0, -1):
        say = f"{count} GPU{'s' * (count > 1)} instead of {gpu.count}"
        yield say, _with_gpu(request, count=count), "gpu"


def _labels(fleet: Fleet, request: Request) -> Iterator[_Change]:
    for label in request.requires:
        rest = {name: values for name, values in request.requires.items() if name != label}
        yield f"without the label {label}", msgspec.structs.replace(request, requires=rest), "requires"


_KINDS: Final[tuple[Callable[[Fleet, Request], Iterator[_Change]], ...]] = (
    _models, _vendor, _memory, _share, _host, _gang, _replicas, _count, _labels,
)  # fmt: skip
