"""Finds smaller or other requests that may start now in place of a waiting one, least sacrifice first.

A job that waits for others, or for a time, could start only without that. Of all others the order is: a time limit that
lets it in, any device, GPUs without NVLink, another model, any vendor, a lower compute capability, less memory, another
slice, a whole GPU instead of a slice, a shared GPU or another share, a lower level of enforcement, fewer cores or less
host memory, several replicas of a gang on one host, its ranks in several places, no gang, fewer replicas, a gang on
several hosts instead of more GPUs than one host has, fewer GPUs, one label less. These are candidates: each is tried
before it is suggested (see `fixes`). Requests that would be refused are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import HostClass
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.fleet.spelling import short_name, spelled
from moorage.scheduler.core.schedule.runtime import FREED_MS
from moorage.schemas.answers.jobs import Fix
from moorage.schemas.capabilities import LEVELS, level_number
from moorage.schemas.driver_config import DEVICE_KEYS
from moorage.schemas.gpu import (
    GpuSpec,
    capability_of,
    format_token,
    is_superchip,
    mig_profile,
    model_matches,
    nominal_mib,
    with_token,
)
from moorage.schemas.job import GpuCount, Request, ResourceRequirements, Resources

#: the most models of the fleet that are suggested
MODELS_TRIED_MAX: Final = 16
#: a suggested time limit leaves this many seconds, and this part of the time, for submitting it
HURRY_S: Final = 5
HURRY_PART: Final = 0.05
_MIB_PER_GIB: Final = 1024
_GB: Final = re.compile(r"\.([0-9]+)gb")
#: fields allowed only in requests for shared GPUs
_OF_SHARERS: Final = ("sharing", "share", "prefer", "mps_pipe_dir", "mps_log_dir", "time_slicing_config_path")


class Change(NamedTuple):
    """A changed request. `say` is the change in words, `fields` differ from the waiting request `before`."""

    say: str
    request: Request
    fields: tuple[str, ...]
    before: Request

    def as_fix(self) -> Fix:
        """Return the change in the form of `explain`: the new fields, and the GPUs as a token if that suffices, with
        `gang` where the replicas become one."""
        request = msgspec.to_builtins(self.request)
        fix = Fix(say=self.say, request={name: request.get(name) for name in self.fields})
        has_range = self.request.ranks is not None  # which no token says
        if {"gpu", "replicas"} & set(self.fields) and not (has_range and "replicas" in self.fields):
            gpu, before = self.request.effective_gpu, self.before.effective_gpu
            token = format_token(gpu, 1 if has_range else self.request.copies)
            gang = False
            if gpu is not None and before is not None and gpu.scheduling == "gang":
                gang = (before.scheduling, before.distinct_hosts) != ("gang", gpu.distinct_hosts)
            if gang and before is not None:
                before = msgspec.structs.replace(before, scheduling="gang", distinct_hosts=False)
            if with_token(before, token) == gpu:
                return msgspec.structs.replace(fix, gpu=token, gang=gang)
        return fix


def singles(fleet: Fleet, request: Request, needed_in_ms: Sequence[int]) -> list[Iterator[Change]]:
    """Return an iterator of changes for each kind, in the module's order.

    `needed_in_ms`: in how many ms hosts that are free until then are needed for another job, or leave for a drain.
    """
    return [
        (Change(*change, request) for change in kind(fleet, request) if not change[1].trouble)
        for kind in _kinds(request, needed_in_ms)
    ]


def pairs(fleet: Fleet, request: Request, needed_in_ms: Sequence[int]) -> list[Iterator[Change]]:
    """Return iterators of combinations of two changes: the mildest and the strongest of each kind with all later kinds.

    `needed_in_ms` is as in `singles`.
    """
    kinds, found = _kinds(request, needed_in_ms), list[Iterator[Change]]()
    for at, kind in enumerate(kinds):
        first = list(kind(fleet, request))
        for change in [*first[:1], *first[1:][-1:]]:
            found += [_both(fleet, request, change, other) for other in kinds[at + 1 :]]
    return found


def _both(fleet: Fleet, request: Request, first: _Change, kind: _Kind) -> Iterator[Change]:
    say, changed, fields = first
    for more, both, others in kind(fleet, changed):
        if not both.trouble:
            yield Change(f"{say}, {more}", both, tuple(dict.fromkeys((*fields, *others))), request)


def _kinds(request: Request, needed_in_ms: Sequence[int]) -> tuple[_Kind, ...]:
    if request.after or request.start_after_s:  # whatever else it asks for, it would wait for those jobs, or that time
        return (*[_no_after] * bool(request.after), *[_no_time] * bool(request.start_after_s))
    in_time = partial(_time_limit, needed_in_ms)
    if request.resource_requirements is not None and request.device_ids:
        return (in_time, _any_device, _host, _labels)  # the ids are in a field that another `gpu` would replace
    return (in_time, *_KINDS)


def _time_limit(needed_in_ms: Sequence[int], fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield time limits with which the job ends before its hosts are needed, with some time for submitting it."""
    run = request.workload
    for end_ms in needed_in_ms:
        most_s = (end_ms - FREED_MS) / 1000 - run.grace_s
        limit_s = _round_down(most_s * (1 - HURRY_PART) - HURRY_S)
        too_short = run.checkpoint_before_s is not None and limit_s <= run.checkpoint_before_s
        if limit_s < 1 or too_short or (run.timeout_s is not None and limit_s >= run.timeout_s):
            continue
        changed = msgspec.structs.replace(run, timeout_s=float(limit_s))
        now = f" instead of {_duration(run.timeout_s)}" if run.timeout_s is not None else ""
        say = f"a time limit of {_duration(limit_s)}{now}: it ends before the hosts are needed"
        yield say, msgspec.structs.replace(request, run=changed), ("run",)


_Change = tuple[str, Request, tuple[str, ...]]
_Kind = Callable[[Fleet, Request], Iterator[_Change]]


def _round_down(seconds: float) -> int:
    """Return a time rounded down to whole minutes from two minutes on, else to whole seconds."""
    return int(seconds // 60 * 60) if seconds >= 120 else int(seconds)


def _duration(seconds: float) -> str:
    """Return a time as written on the command line: 12m, 90s."""
    return f"{seconds / 60:g}m" if seconds >= 120 and seconds % 60 == 0 else f"{seconds:g}s"


def _with_gpu(request: Request, **fields: Any) -> Request:
    gpu = request.effective_gpu
    assert gpu is not None
    return msgspec.structs.replace(request, gpu=msgspec.structs.replace(gpu, **fields), resource_requirements=None)


def _any_device(fleet: Fleet, request: Request) -> Iterator[_Change]:
    ids = request.device_ids
    if not ids:
        return
    say = f"any GPU that fits instead of {', '.join(ids[:3])}{', …' if len(ids) > 3 else ''}"
    wanted = request.resource_requirements
    if wanted is not None and wanted.gpu is not None and wanted.gpu.devices:
        any_one = ResourceRequirements(GpuCount(wanted.gpu.count))
        yield say, msgspec.structs.replace(request, resource_requirements=any_one), ("resource_requirements",)
    elif request.template is None:
        driver = request.workload.driver
        block = {key: value for key, value in request.driver_config[driver].items() if key not in DEVICE_KEYS}
        blocks = {**request.driver_config, driver: block}
        yield say, msgspec.structs.replace(request, driver_config=blocks), ("driver_config",)


def _devices(fleet: Fleet) -> dict[str, int]:
    """Return the fleet's device names with their memory in MiB, in the order in which hosts joined."""
    found: dict[str, int] = {}
    for cls in fleet.classes.values():
        for _, _, name, memory_mib, _ in cls.devices:
            found[name] = max(found.get(name, 0), memory_mib)
    return found


def _models(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield other models if the fleet has the requested one, else only its spelling in the fleet."""
    gpu = request.effective_gpu
    if gpu is None or not gpu.models:
        return
    devices = _devices(fleet)
    known = {name for name in devices if any(model_matches(model, name) for model in gpu.models)}
    if not known:
        for model in gpu.models:
            if found := spelled(model, devices.items()):
                memory_mib = nominal_mib(found.gigabytes) if found.gigabytes else gpu.min_memory_mib
                changed = _with_gpu(request, model=found.model, min_memory_mib=memory_mib)
                yield f"{found.words} instead of {model}", changed, ("gpu",)
        return
    superchips = any(map(is_superchip, known))
    tried = set()
    for name in list(devices)[:MODELS_TRIED_MAX]:
        short = short_name(name)
        if short in tried or name in known or (is_superchip(name) and not superchips):
            continue
        tried.add(short)
        yield f"accept {short} too", _with_gpu(request, model=[*gpu.models, short]), ("gpu",)


def _vendor(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is not None and gpu.effective_vendor:
        yield "accept any vendor", _with_gpu(request, vendor=""), ("gpu",)


def _memory(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield requests for as much memory as each smaller kind of device in the fleet has, the largest first."""
    gpu = request.effective_gpu
    if gpu is None or not gpu.min_memory_mib:
        return
    for memory_mib in sorted(set(_devices(fleet).values()), reverse=True):
        if 0 < memory_mib < gpu.min_memory_mib:
            say = f"{_gib(memory_mib)} GiB instead of {_gib(gpu.min_memory_mib)} GiB"
            yield say, _with_gpu(request, min_memory_mib=memory_mib), ("gpu",)


def _compute(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield requests for a lower compute capability that the fleet has, the highest first."""
    gpu = request.effective_gpu
    if gpu is None or gpu.min_compute_capability is None:
        return
    least = capability_of(gpu.min_compute_capability)
    lower = {compute for cls in fleet.classes.values() for *_, compute in cls.devices if 0 < compute < least}
    for compute in sorted(lower, reverse=True):
        asked = f"{compute / 10}"
        say = f"compute capability {asked} instead of {gpu.min_compute_capability}"
        yield say, _with_gpu(request, min_compute_capability=asked), ("gpu",)


def _gib(mib: int) -> str:
    return f"{mib / _MIB_PER_GIB:.1f}".removesuffix(".0")


def _share(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield requests for a shared GPU (mps, time-slice) instead of an exclusive one.

    For a request that shares a GPU: for smaller shares, then for a whole GPU, or for any index instead of one index.
    """
    gpu = request.effective_gpu
    if gpu is None:
        return
    if gpu.effective_sharing == "exclusive":
        if gpu.effective_scheduling == "gang":
            return  # the ranks of a training would share GPUs with each other
        yield "mode mps", _with_gpu(request, sharing="mps"), ("gpu",)
        yield "mode time-slice", _with_gpu(request, sharing="time-slice"), ("gpu",)
        return
    if gpu.share is not None:
        for percent in (75, 50, 25, 10):
            if percent < gpu.share.compute_percent < 100:
                share = msgspec.structs.replace(gpu.share, compute_percent=percent)
                say = f"{percent} % of a GPU instead of {gpu.share.compute_percent} %"
                yield say, _with_gpu(request, share=share), ("gpu",)
    if gpu.time_slice_index is None:
        yield "a whole GPU", _with_gpu(request, **dict.fromkeys(_OF_SHARERS)), ("gpu",)
    else:
        say = f"any GPU instead of the one with index {gpu.time_slice_index}"
        yield say, _with_gpu(request, time_slice_index=None), ("gpu",)


def _slice(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield slices of other profiles in the fleet: the smallest with at least as much memory, then smaller ones."""
    gpu = request.effective_gpu
    if gpu is None or gpu.profile is None:
        return
    profiles = sorted({mig_profile(name) for name in _devices(fleet)} - {"", gpu.profile}, key=_gb)
    larger = [profile for profile in profiles if _gb(profile) >= _gb(gpu.profile)]
    for profile in [*larger, *reversed(profiles[: len(profiles) - len(larger)])]:
        yield f"a slice {profile} instead of {gpu.profile}", _with_gpu(request, profile=profile), ("gpu",)


def _no_slice(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is not None and gpu.profile is not None:
        yield f"a whole GPU instead of a slice {gpu.profile}", _with_gpu(request, profile=None), ("gpu",)


def _gb(profile: str) -> int:
    """Return the GB in the name of a MIG profile: 10 for `1g.10gb+me`; 0 if there are none."""
    found = _GB.search(profile)
    return int(found[1]) if found is not None else 0


def _level(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield lower levels of enforcement, the highest first: of memory, of compute, of both."""
    gpu = request.effective_gpu
    if gpu is None or gpu.enforce is None:
        return
    for names in (("memory",), ("compute",), ("memory", "compute")):
        asked = [level_number(getattr(gpu.enforce, name) or LEVELS[0]) for name in names]
        for lower in range(max(asked) - 1, -1, -1) if min(asked) else ():
            levels = {name: LEVELS[min(lower, most)] for name, most in zip(names, asked, strict=True)}
            say = ", ".join(f"{name} {levels[name]} instead of {getattr(gpu.enforce, name)}" for name in names)
            yield say, _with_gpu(request, enforce=msgspec.structs.replace(gpu.enforce, **levels)), ("gpu",)


def _host(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield requests for the most CPU and host memory that is free on a host, where that is less than asked for.

    The two may be free on different hosts. Both are rounded down to whole cores and GiB if that leaves any.
    """
    asked = request.resources
    if asked is None:
        return
    usable = [host for host in fleet.hosts.values() if host.usable]
    shape = Shape((), 0, request)
    cpu = max((host.cpu_left(shape) for host in usable if host.open or request.effective_gpu is None), default=0)
    memory = max((host.memory_free for host in usable if host.open or request.effective_gpu is None), default=0)
    cores, gib = cpu // 1000 * 1000 or cpu, memory // _MIB_PER_GIB * _MIB_PER_GIB or memory
    less_cpu, less_memory = 0 < cores < asked.cpu_milli, 0 < gib < asked.memory_mib
    if less_cpu:
        say = f"{cores / 1000:g} cores instead of {asked.cpu_milli / 1000:g}"
        yield say, msgspec.structs.replace(request, resources=Resources(cores, asked.memory_mib)), ("resources",)
    if less_memory:
        say = f"{_gib(gib)} GiB of host memory instead of {_gib(asked.memory_mib)}"
        yield say, msgspec.structs.replace(request, resources=Resources(asked.cpu_milli, gib)), ("resources",)
    if less_cpu and less_memory:
        say = f"{cores / 1000:g} cores and {_gib(gib)} GiB of host memory"
        yield say, msgspec.structs.replace(request, resources=Resources(cores, gib)), ("resources",)


def _same_hosts(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is not None and gpu.distinct_hosts:
        yield "several replicas on one host", _with_gpu(request, distinct_hosts=False), ("gpu",)


def _any_links(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is not None and gpu.topology is not None:
        yield "GPUs that NVLink does not join", _with_gpu(request, topology=None), ("gpu",)


def _any_place(fleet: Fleet, request: Request) -> Iterator[_Change]:
    if len(fleet.places(Shapes().of(request))) > 1:
        yield "its ranks in any places", msgspec.structs.replace(request, same=[]), ("same",)


def _gang(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is not None and gpu.effective_scheduling == "gang" and request.copies > 1:
        changed = _with_gpu(
            msgspec.structs.replace(request, replicas=request.copies), scheduling=None, distinct_hosts=False
        )
        yield "best effort: what fits starts now, the rest later", changed, ("gpu",)


def _replicas(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield requests for fewer replicas of a gang, the most first, not for every number."""
    gpu = request.effective_gpu
    if gpu is None or gpu.effective_scheduling != "gang":
        return
    ranks = request.ranks
    least = request.copies if ranks is None else ranks.min
    counts = [*range(least - 1, max(0, least - 9), -1)]
    while counts and counts[-1] > 1:
        counts.append(counts[-1] // 2)
    for replicas in counts:
        asked = replicas if ranks is None else msgspec.structs.replace(ranks, min=replicas)
        changed = msgspec.structs.replace(request, replicas=asked)
        at_least = "" if ranks is None else "at least "
        yield f"{at_least}{replicas} replica{'s' * (replicas > 1)} instead of {least}", changed, ("replicas",)


def _several_hosts(fleet: Fleet, request: Request) -> Iterator[_Change]:
    """Yield gangs with as many GPUs in all, for a request for more GPUs of one host than any host has, the gang with
    the fewest replicas first."""
    gpu = request.effective_gpu
    if gpu is None or gpu.effective_sharing != "exclusive" or request.device_ids or request.scale is not None:
        return
    if request.copies > 1 and gpu.effective_scheduling != "gang":
        return  # each replica is a job of its own
    most = max((_matching(cls, gpu) for cls in fleet.classes.values()), default=0)
    if most >= gpu.count:
        return
    for count in range(most, 1, -1):  # several replicas on one host are as many programs, so none with one GPU each
        if gpu.count % count == 0:
            replicas = request.copies * gpu.count // count
            changed = msgspec.structs.replace(_with_gpu(request, count=count, scheduling="gang"), replicas=replicas)
            say = f"{replicas} replicas of {count} GPUs as a gang instead of {gpu.count} GPUs on one host"
            yield say, changed, ("replicas", "gpu")


def _matching(cls: HostClass, gpu: GpuSpec) -> int:
    """Return how many GPUs a host of a class has, of the models of a spec if it names any."""
    return sum(
        1 for _, _, name, *_ in cls.devices if not gpu.models or any(model_matches(each, name) for each in gpu.models)
    )


def _count(fleet: Fleet, request: Request) -> Iterator[_Change]:
    gpu = request.effective_gpu
    if gpu is None or request.device_ids:
        return
    for count in range(gpu.count - 1, 0, -1):
        say = f"{count} GPU{'s' * (count > 1)} instead of {gpu.count}"
        yield say, _with_gpu(request, count=count, topology=gpu.topology if count > 1 else None), ("gpu",)


def _no_after(fleet: Fleet, request: Request) -> Iterator[_Change]:
    names = [each.job for each in request.awaited]
    say = f"without waiting for {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    yield say, msgspec.structs.replace(request, after=[]), ("after",)


def _no_time(fleet: Fleet, request: Request) -> Iterator[_Change]:
    yield "at once", msgspec.structs.replace(request, start_after_s=None), ("start_after_s",)


def _labels(fleet: Fleet, request: Request) -> Iterator[_Change]:
    for label in request.requires:
        rest = {name: values for name, values in request.requires.items() if name != label}
        yield f"without the label {label}", msgspec.structs.replace(request, requires=rest), ("requires",)
    for text in request.where:
        left = [each for each in request.where if each != text]
        yield f"without {text}", msgspec.structs.replace(request, where=left), ("where",)


_KINDS: Final[tuple[_Kind, ...]] = (
    _any_device, _any_links, _models, _vendor, _compute, _memory, _slice, _no_slice, _share, _level, _host, _same_hosts,
    _any_place, _gang, _replicas, _several_hosts, _count, _labels,
)  # fmt: skip
