"""What a request asks for that no known worker could ever give it, in words: the filter that came nearest to a fit;
and what a model that it names is only a part of."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from heapq import nsmallest
from typing import Final

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import FILTERS, HostClass, size_of_largest
from moorage.scheduler.core.shape import Shape
from moorage.schemas.gpu import WHOLE_WORDS, model_matches

#: names of models, drivers or labels that one text shows
NAMES_SHOWN_MAX: Final = 3
#: texts that are kept until the fleet changes, and so are names that were compared with the fleet's
KEPT_MAX: Final = 1_000


class Unmatched:
    """Texts by shape, kept until the fleet changes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._inventory = -1
        self._texts: dict[int, str] = {}
        self._parts: dict[int, str] = {}
        self._names: list[str] = []  # of all devices of the fleet
        self._close: dict[str, list[str]] = {}  # model as asked for, in lower case -> the fleet's names nearest to it

    def why(self, shape: Shape) -> str:
        """Why no known worker could ever run this shape, were it empty. Only of shapes of which that is known."""
        return self._kept(self._texts, shape, self._why)

    def part_of(self, shape: Shape) -> str:
        """What a model that it names is only a part of: no name in the fleet has it as a word. Empty: nothing."""
        return self._kept(self._parts, shape, self._parts_of)

    def _kept(self, texts: dict[int, str], shape: Shape, make: Callable[[Shape], str]) -> str:
        """The text of a shape, made once for each fleet."""
        self._look()
        text = texts.get(shape.index)
        if text is None:
            if len(texts) >= KEPT_MAX:
                texts.clear()
            text = texts[shape.index] = make(shape)
        return text

    def _parts_of(self, shape: Shape) -> str:
        return "; ".join(filter(None, map(self._part, shape.models)))

    def _part(self, model: str) -> str:
        found = {name: matched for name in self._names if (matched := model_matches(model, name))}
        if not found or WHOLE_WORDS in found.values():
            return ""
        return f"{model} is part of {_shown(found)} only; ={model} takes that model alone"

    def _look(self) -> None:
        """What was said of another fleet is forgotten."""
        if self._inventory != self._fleet.inventory:
            self._inventory = self._fleet.inventory
            self._names = sorted({name for cls in self._fleet.classes.values() for _, _, name, _ in cls.devices})
            for kept in (self._texts, self._parts, self._close):
                kept.clear()

    def reason(self, shape: Shape) -> str:
        """Return the filter that came farthest; "" where a class passes all of them, but is too small."""
        reasons = {cls.fit(shape).reason for cls in self._fleet.classes.values()}
        return max(reasons, key=lambda reason: (not reason, FILTERS.index(reason) if reason else 0), default="")

    def _why(self, shape: Shape) -> str:
        classes: dict[str, list[HostClass]] = {}
        for cls in self._fleet.classes.values():
            classes.setdefault(cls.fit(shape).reason, []).append(cls)
        if not classes:
            return "the fleet is empty"
        if "" in classes:
            return self._of_hosts(shape, classes[""])
        reason = max(classes, key=FILTERS.index)  # the one that came farthest is nearest to a fit
        if reason == "label":
            return self._of_labels(shape, classes[reason])
        return _TEXTS[reason](shape, classes[reason]) if reason != "model" else self._of_models(shape)

    def _of_labels(self, shape: Shape, classes: list[HostClass]) -> str:
        """The label that the fewest workers have as it is required."""
        count = {
            label: sum(len(cls.hosts) for cls in classes if cls.labels.get(label) in allowed)
            for label, allowed in shape.requires.items()
        }
        label = min(count, key=lambda name: (count[name], name))
        if count[label]:
            return "no worker has all the labels that it requires, though each of them somebody has"
        known = nsmallest(NAMES_SHOWN_MAX + 1, self._fleet.labelled.get(label, ()))
        wanted = _shown((f"{label}={value}" for value in shape.requires[label]), " or ")
        has = f"the fleet has {label}={_shown(known)}" if known else f"nobody has the label {label}"
        return f"no worker is labelled {wanted}: {has}"

    def _of_models(self, shape: Shape) -> str:
        near = [name for model in shape.models for name in self._near(model.lstrip("=").lower())]
        return "the fleet has " + _shown(dict.fromkeys(near) or self._names)

    def _near(self, model: str) -> list[str]:
        found = self._close.get(model)
        if found is None:
            if len(self._close) >= KEPT_MAX:
                self._close.clear()
            lower = {name.lower(): name for name in self._names}
            hits = difflib.get_close_matches(model, lower, n=NAMES_SHOWN_MAX, cutoff=0.3)
            found = self._close[model] = [lower[hit] for hit in hits]
        return found

    def _of_hosts(self, shape: Shape, classes: list[HostClass]) -> str:
        sizes = [(next(iter(alike.values())), len(alike)) for cls in classes for alike in cls.sizes.values()]
        rooms = sum(host.replicas_of(shape, "ever") * count for host, count in sizes)
        if rooms:
            return f"the whole fleet would hold {rooms} of its {shape.together} replicas at once"
        hosts = [host for host, _ in sizes]
        lent = max((host.lent & host.cls.fit(shape).mask).bit_count() for host in hosts)
        if lent < shape.count:
            return f"the most such GPUs that one worker lends is {lent}"
        return f"the most that one worker with such GPUs has is {size_of_largest(hosts)} of memory"


def _shown(names: Iterable[str], between: str = ", ") -> str:
    shown = list(names)
    return between.join([*shown[:NAMES_SHOWN_MAX], *(["…"] if len(shown) > NAMES_SHOWN_MAX else [])])


def _driver(shape: Shape, classes: list[HostClass]) -> str:
    offered = sorted({driver for cls in classes for driver in cls.drivers})
    return f"no worker offers the driver {shape.driver}, but {_shown(offered) or 'none'}"


def _rules(shape: Shape, classes: list[HostClass]) -> str:
    return f"no worker lets its tenant have the driver {shape.driver}"


def _sharing(shape: Shape, classes: list[HostClass]) -> str:
    return (
        f"no worker with GPUs offers its sharing mode, but {_shown(sorted({m for cls in classes for m in cls.modes}))}"
    )


def _vendor(shape: Shape, classes: list[HostClass]) -> str:
    vendors = sorted({vendor for cls in classes for _, vendor, _, _ in cls.devices})
    return f"the fleet's GPUs are by {_shown(vendors)}"


def _memory(shape: Shape, classes: list[HostClass]) -> str:
    largest = max(memory for cls in classes for _, _, _, memory in cls.named(shape))
    return f"the largest GPU that it names has {largest} MiB"


def _slot(shape: Shape, classes: list[HostClass]) -> str:
    return f"no worker has such a GPU with the index {shape.slot_index}"


def _device(shape: Shape, classes: list[HostClass]) -> str:
    return f"no worker with such GPUs has {_shown(shape.device_ids)}{' together' if shape.count > 1 else ''}"


def _gpu_driver(shape: Shape, classes: list[HostClass]) -> str:
    return f"no worker with GPUs lets jobs of the driver {shape.driver} have them"


def _count(shape: Shape, classes: list[HostClass]) -> str:
    most = max(
        sum(bool(shape.device_rank(vendor, name, memory, index)) for index, vendor, name, memory in cls.devices)
        for cls in classes
    )
    return f"the most such GPUs on one host is {most}"


_TEXTS: Final[dict[str, Callable[[Shape, list[HostClass]], str]]] = {
    "driver": _driver,
    "rules": _rules,
    "no-gpu": lambda shape, classes: "no host of the fleet has a GPU",
    "sharing": _sharing,
    "vendor": _vendor,
    "memory": _memory,
    "slot": _slot,
    "count": _count,
    "gpu-driver": _gpu_driver,
    "mode": lambda shape, classes: "no driver for Apple's GPUs is built, so none has a mode",
    "device": _device,
}
