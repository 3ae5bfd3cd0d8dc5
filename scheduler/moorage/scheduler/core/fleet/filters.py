"""The filters that decide whether hosts could ever run a request: one for each reason, in the order they are checked.

A filter says whether hosts of a class pass. If no host of the fleet passes, it also says what the fleet has instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Final, Literal, NamedTuple, Protocol

from moorage.scheduler.core.fleet.kit import Device, Kit
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.records import MODE_OF, Mode
from moorage.schemas import reasons
from moorage.schemas.capabilities import LEVELS
from moorage.schemas.driver_config import no_ids, takes_ids
from moorage.schemas.gpu import APPLE, mig_profile
from moorage.schemas.reasons import Reason
from moorage.schemas.units import many

#: how many names of models, drivers or labels one text shows
NAMES_SHOWN_MAX: Final = 3
_NO_LABELS: Final[Mapping[str, str]] = {}
MODE_WORDS: Final = {int(mode): word for word, mode in MODE_OF.items()}


class Offer(Protocol):
    """Hosts that are alike: see `HostClass`."""

    @property
    def kit(self) -> Kit: ...
    @property
    def devices(self) -> Sequence[Device]: ...
    @property
    def hosts(self) -> Mapping[int, object]: ...
    @property
    def labels(self) -> Mapping[str, str]: ...

    def named(self, shape: Shape) -> list[Device]: ...
    def answering(self, shape: Shape) -> int: ...
    def exactly(self, shape: Shape) -> int: ...
    def labelled_slots(self, shape: Shape) -> int: ...
    def rooms(self, slots: int, shape: Shape) -> int: ...


class Names(Protocol):
    """Gives the names that occur in the fleet."""

    def labelled(self, label: str) -> Iterable[str]: ...
    def gpus_labelled(self, label: str) -> Iterable[str]: ...
    def near_miss(self, shape: Shape, offers: Sequence[Offer]) -> str: ...

    def nearest_models(self, shape: Shape) -> Iterable[str]: ...


#: describes what hosts have that failed at a filter
Words = Callable[[Shape, Sequence[Offer], Names], str]


class Filter(NamedTuple):
    """`passes` says whether hosts pass; `words` describes what the hosts have that failed at this filter.

    `of` is what it checks: the hosts, their labels, any one device, all matching devices, or the names of these. A
    filter of one device only explains why no device matches (see `Shape.device_rank`).
    """

    reason: Reason
    of: Literal["host", "labels", "one device", "devices", "names"]
    passes: Callable[[Offer, Shape], bool]
    words: Words


def failed(offer: Offer, shape: Shape, of: str) -> str:
    """Return the reason of the first filter of this kind that fails; empty if all pass."""
    return next((each.reason.name for each in FILTERS.values() if each.of == of and not each.passes(offer, shape)), "")


def nearest_to_a_fit(names: Iterable[str]) -> str:
    """Return that of these reasons whose filter is checked last: hosts that fail there passed all earlier filters.

    There must be at least one reason.
    """
    return max(names, key=list(FILTERS).index)


def shown(names: Iterable[str], between: str = ", ") -> str:
    """Return the first few names as one text."""
    every = list(names)
    return between.join([*every[:NAMES_SHOWN_MAX], *(["…"] if len(every) > NAMES_SHOWN_MAX else [])])


def has_labels(labels: Mapping[str, str], shape: Shape, own: Mapping[str, str] = _NO_LABELS) -> bool:
    """Return whether hosts with these labels have all that a shape requires, and pass its conditions about them.

    `own` are the labels of one of their GPUs, each asked before the host's of that name.
    """
    every = {**labels, **own} if own else labels
    return all(every.get(label) in allowed for label, allowed in shape.requires.items()) and all(
        each.holds((labels if each.is_of_place else every).get(each.label)) for each in shape.where
    )


# ------------------------------------------------------------------------------------------------ whether it passes


def _lets_have_driver(offer: Offer, shape: Shape) -> bool:
    return not offer.kit.drivers_for or shape.driver in offer.kit.permitted(shape.tenant)


def _lets_have_user(offer: Offer, shape: Shape) -> bool:
    return not shape.as_user or shape.driver in offer.kit.user_drivers or shape.as_user in offer.kit.own_user


def _lets_answer(offer: Offer, shape: Shape) -> bool:
    return not shape.answers_calls or shape.driver in offer.kit.call_drivers


def _lets_sleep(offer: Offer, shape: Shape) -> bool:
    return not shape.must_sleep or offer.kit.lets_sleep(shape.driver, by_request=shape.sleeps_itself)


def _reaches(offer: Offer, shape: Shape) -> bool:
    return not shape.reached or (shape.driver in offer.kit.reach_drivers and offer.kit.ports >= shape.ports)


def _limits_memory(offer: Offer, shape: Shape) -> bool:
    return not shape.memory_enforced or shape.driver in offer.kit.memory_limits


def _has_gpu(offer: Offer, shape: Shape) -> bool:
    return shape.mode == Mode.NONE or bool(offer.kit.devices)


def _lets_have_gpus(offer: Offer, shape: Shape) -> bool:
    return shape.mode == Mode.NONE or shape.driver in offer.kit.gpu_drivers


def _shares(offer: Offer, shape: Shape) -> bool:
    return shape.mode == Mode.NONE or MODE_WORDS[shape.mode] in offer.kit.modes


def _enforces(offer: Offer, shape: Shape) -> bool:
    memory, compute = offer.kit.level(shape.driver, MODE_WORDS[shape.mode]) if any(shape.levels) else shape.levels
    return memory >= shape.levels[0] and compute >= shape.levels[1]


def _has_vendor(offer: Offer, shape: Shape) -> bool:
    return any(not shape.vendor or vendor.lower() == shape.vendor for _, vendor, *_ in offer.kit.devices)


def _has_mode(offer: Offer, shape: Shape) -> bool:
    vendors = {
        device[1].lower() for device in offer.kit.devices if not shape.vendor or device[1].lower() == shape.vendor
    }
    return not shape.not_apple or vendors != {APPLE}


def _has_compute(offer: Offer, shape: Shape) -> bool:
    return any(compute >= shape.min_compute for *_, compute in offer.named(shape))


def _has_profile(offer: Offer, shape: Shape) -> bool:
    return not shape.slice_profile or any(
        mig_profile(name) == shape.slice_profile for _, _, name, *_ in offer.kit.devices
    )


def _has_memory(offer: Offer, shape: Shape) -> bool:
    least = max(shape.min_memory_mib, shape.share_mib)
    return any(memory >= least and compute >= shape.min_compute for *_, memory, compute in offer.named(shape))


def _has_slot(offer: Offer, shape: Shape) -> bool:
    return any(shape.device_rank(*device[1:], device[0]) for device in offer.kit.devices)


def _has_so_many(offer: Offer, shape: Shape) -> bool:
    slots = offer.answering(shape)
    return slots.bit_count() >= shape.count if shape.linked else offer.rooms(slots, shape) > 0


def _has_links(offer: Offer, shape: Shape) -> bool:
    return not shape.linked or offer.rooms(offer.answering(shape), shape) > 0


# ------------------------------------------------------------------------------------- what the fleet has instead


def _no_worker(shape: Shape, also: str = "") -> str:
    """Return `no worker with …`, naming what the filters before those of devices check.

    An earlier filter may have taken workers out that have what the text says is missing.
    """
    has = [
        *([also] if also else []),
        f"the driver {shape.driver}",
        *(["its labels"] if shape.requires or shape.where else []),
    ]
    return f"no worker with {', '.join(has[:-1])}{' and ' if len(has) > 1 else ''}{has[-1]}"


def _drivers(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    offered = sorted({driver for offer in offers for driver in offer.kit.drivers})
    return f"no worker offers the driver {shape.driver}; the workers offer {shown(offered) or 'no driver'}"


def _with_driver(does: str) -> Words:
    """Return the text of a failed filter: "no worker that offers the driver <driver> <does>"."""
    return lambda shape, offers, names: f"no worker that offers the driver {shape.driver} {does}"


def _ports(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    gives = f"gives its jobs {many(shape.ports, 'port')} and looks whether they are ready"
    return f"no worker that offers the driver {shape.driver} {gives}"


def _labels(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    """Return a text about the condition, or the required label, that the fewest workers pass."""
    if some := [offer for offer in offers if shape.count and offer.kit.slot_labels and offer.labelled_slots(shape)]:
        return _too_few_labelled(shape, some)
    for each in shape.where:
        of_gpus = shape.count > 0 and not each.is_of_place
        if not any(map(each.holds, _values_of(each.label, offers, of_gpus))):
            has = _has_instead(each.label, names, of_gpus)
            return f"no worker with the driver {shape.driver} has {each}: {has}"
    count = {
        label: sum(len(offer.hosts) for offer in offers if set(allowed) & _values_of(label, [offer], shape.count > 0))
        for label, allowed in shape.requires.items()
    }
    label = min(count, key=lambda name: (count[name], name), default="")
    if not label or count[label]:
        return (
            f"no worker with the driver {shape.driver} has all the labels that it requires, though each label is on one"
        )
    wanted = shown((f"{label}={value}" for value in shape.requires[label]), " or ")
    has = _has_instead(label, names, shape.count > 0)
    return f"no worker with the driver {shape.driver} is labelled {wanted}: {has}"


def _values_of(label: str, offers: Sequence[Offer], of_gpus: bool) -> set[str | None]:
    """Return the values of a label on these hosts, or `of_gpus` on each of their GPUs; None: without the label."""
    found = set[str | None]()
    for offer in offers:
        value, slots = offer.labels.get(label), offer.kit.slot_labels if of_gpus else ()
        found.update(dict(labels).get(label, value) for labels in slots)
        found.update(() if slots else [value])
    return found


def _has_instead(label: str, names: Names, of_gpus: bool) -> str:
    """Return which values of a label the fleet has, `of_gpus` also on single GPUs."""
    on_gpus = set(names.gpus_labelled(label))
    if known := nsmallest(NAMES_SHOWN_MAX + 1, {*names.labelled(label), *(on_gpus if of_gpus else ())}):
        return f"the fleet has {label}={shown(known)}"
    return f"the label {label} is on single GPUs, not on workers" if on_gpus else f"no worker has the label {label}"


def _too_few_labelled(shape: Shape, offers: Sequence[Offer]) -> str:
    sets = [
        offer.answering(shape) & offer.labelled_slots(shape) & each
        for offer in offers
        for each in (offer.kit.links if shape.linked else (-1,))
    ]
    most = max(map(int.bit_count, sets), default=0)
    return f"the most matching GPUs{' that NVLink joins' * shape.linked} with its labels on one worker is {most}"


def _gpu_drivers(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    return f"{_no_worker(shape, 'GPUs')} gives its GPUs to jobs of this driver"


def _modes(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    modes = sorted({mode for offer in offers for mode in offer.kit.modes})
    return f"{_no_worker(shape, 'GPUs')} offers its sharing mode; these workers offer {shown(modes) or 'no mode'}"


def _levels(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    mode = MODE_WORDS[shape.mode]
    memory, compute = max(offer.kit.level(shape.driver, mode) for offer in offers)
    best = f"memory is {LEVELS[memory]} and compute {LEVELS[compute]}"
    return f"the best that a worker with the driver {shape.driver} enforces of a {mode} share: {best}"


def _vendors(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    vendors = shown(sorted({device[1] for offer in offers for device in offer.kit.devices}))
    return f"{_no_worker(shape)} has a GPU by {shape.vendor}; the GPUs of these workers are by {vendors}"


def _computes(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    most = max(compute for offer in offers for *_, compute in offer.named(shape))
    if not most:
        return "the GPUs that match otherwise have no compute capability"
    return f"the highest compute capability of the GPUs that match otherwise is {most / 10}"


def _memories(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    every = (device for offer in offers for device in offer.named(shape))
    largest = max(memory for *_, memory, compute in every if compute >= shape.min_compute)
    return f"the largest GPU that matches otherwise has {largest} MiB"


def _counts(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    return f"the most matching GPUs on one worker is {max(offer.answering(shape).bit_count() for offer in offers)}"


def _links(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    sets = ((offer.answering(shape) & each).bit_count() for offer in offers for each in offer.kit.links)
    return f"the most matching GPUs that NVLink joins on one worker is {max(sets, default=0)}"


def _kept(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    return f"the workers keep each matching GPU for other sharing modes than {MODE_WORDS[shape.mode]}"


def _named(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    if not takes_ids(shape.driver):
        return no_ids(shape.driver)
    return f"no worker with such GPUs has {shown(shape.device_ids)}{' together' if shape.count > 1 else ''}"


_IN_ORDER: Final = (
    Filter(reasons.DRIVER, "host", lambda offer, shape: shape.driver in offer.kit.drivers, _drivers),
    Filter(reasons.RULES, "host", _lets_have_driver, _with_driver("lets its tenant have it")),
    Filter(reasons.NO_USERS, "host", _lets_have_user, _with_driver("may run its jobs as another user than its own")),
    Filter(
        reasons.NO_MEMORY_LIMIT, "host", _limits_memory, _with_driver("has the memory controller that limits its jobs")
    ),
    Filter(reasons.NO_CALLS, "host", _lets_answer, _with_driver("lets its jobs reach the server, to answer calls")),
    Filter(reasons.NO_SLEEP, "host", _lets_sleep, _with_driver("can freeze its jobs, as NVIDIA's driver 570 does")),
    Filter(reasons.NO_PORTS, "host", _reaches, _ports),
    Filter(reasons.LABEL, "labels", lambda offer, shape: offer.labelled_slots(shape) != 0, _labels),
    Filter(reasons.NO_GPU, "host", _has_gpu, lambda shape, offers, names: f"{_no_worker(shape)} has a GPU"),
    Filter(reasons.GPU_DRIVER, "host", _lets_have_gpus, _gpu_drivers),
    Filter(reasons.SHARING, "host", _shares, _modes),
    Filter(reasons.ENFORCE, "host", _enforces, _levels),
    Filter(reasons.VENDOR, "one device", _has_vendor, _vendors),
    Filter(
        reasons.MODE, "one device", _has_mode,
        lambda shape, offers, names: (
            "it asks for gpu.mode; the remaining workers have only Apple's GPUs, and no driver offers it there"
        ),
    ),
    Filter(
        reasons.PROFILE, "one device", _has_profile,
        lambda shape, offers, names: f"{_no_worker(shape)} has a MIG slice {shape.slice_profile}",
    ),
    Filter(
        reasons.MODEL, "one device", lambda offer, shape: bool(offer.named(shape)),
        lambda shape, offers, names: (
            f"{_no_worker(shape)} has a GPU of this model; "
            + (names.near_miss(shape, offers) or f"the fleet has {shown(names.nearest_models(shape))}")
        ),
    ),
    Filter(reasons.COMPUTE, "one device", _has_compute, _computes),
    Filter(reasons.MEMORY, "one device", _has_memory, _memories),
    Filter(
        reasons.SLOT, "one device", _has_slot,
        lambda shape, offers, names: f"no worker has a matching GPU with the index {shape.slot_index}",
    ),
    Filter(reasons.SLOT_MODE, "devices", lambda offer, shape: bool(offer.answering(shape)), _kept),
    Filter(reasons.COUNT, "devices", _has_so_many, _counts),
    Filter(reasons.NVLINK, "devices", _has_links, _links),
    Filter(reasons.DEVICE, "names", lambda offer, shape: not shape.device_ids or bool(offer.exactly(shape)), _named),
)  # fmt: skip
#: by reason, in the order in which they are checked
FILTERS: Final = {each.reason.name: each for each in _IN_ORDER}
