"""Explains why no known worker could ever run a request, and how the fleet spells the models that it names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

from moorage.scheduler.core.fleet.filters import FILTERS, NAMES_SHOWN_MAX, Offer, nearest_to_a_fit, shown
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import HostClass, apart, size_of_largest, too_few_lent
from moorage.scheduler.core.fleet.places import most_in_one
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.fleet.spelling import inside, spelled
from moorage.schemas.gpu import bare_model, model_matches
from moorage.schemas.memo import Memo

#: cached texts, and cached names compared with the fleet's
KEPT_MAX: Final = 1_000


class Unmatched:
    """Makes these texts for shapes, and caches them until the fleet changes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._inventory = -1
        self._texts: Memo[int, str] = Memo(KEPT_MAX)
        self._names: list[str] = []  # of all devices of the fleet
        #: a requested model in lower case -> the fleet's nearest names
        self._close: Memo[str, list[str]] = Memo(KEPT_MAX)

    def why(self, shape: Shape) -> str:
        """Return why no known worker could ever run this shape. Call it only for shapes that none could."""
        self._look()
        for part in shape.parts:
            if self._fleet.lack(part.shape, part.shape.together) > 0:
                return f"group {part.name}: {self.why(part.shape)}"
        if shape.parts:
            return "no place that its ranks may share would hold all of its groups"
        text = self._texts.get(shape.index)
        return self._texts.put(shape.index, self._why(shape)) if text is None else text

    def _look(self) -> None:
        """Empty the caches if the fleet has changed."""
        if self._inventory != self._fleet.inventory:
            self._inventory = self._fleet.inventory
            classes = self._fleet.classes.values()
            self._names = sorted({name for cls in classes for _, _, name, _, _ in cls.devices})
            self._texts.clear()
            self._close.clear()

    def reason(self, shape: Shape) -> str:
        """Return the reason nearest to a fit; "" if there are no hosts, or some pass all filters but are too small."""
        names = {cls.fit(shape).reason for cls in self._fleet.classes.values()}
        return "" if "" in names or not names else nearest_to_a_fit(names)

    def _why(self, shape: Shape) -> str:
        classes: dict[str, list[HostClass]] = {}
        for cls in self._fleet.classes.values():
            classes.setdefault(cls.fit(shape).reason, []).append(cls)
        if not classes:
            return "the fleet is empty"
        if "" in classes:
            return self._of_hosts(shape, classes[""])
        reason = nearest_to_a_fit(classes)
        return FILTERS[reason].words(shape, classes[reason], self)

    def labelled(self, label: str) -> Iterable[str]:
        """Return the values that the fleet has of a label."""
        return self._fleet.labelled.get(label, ())

    def gpus_labelled(self, label: str) -> Iterable[str]:
        """Return the values that single GPUs of the fleet have of a label."""
        return self._fleet.gpus_labelled(label)

    def near_miss(self, shape: Shape, offers: Sequence[Offer]) -> str:
        """Return where a requested model is, how these hosts spell it, or which of their devices have it inside a word.

        `offers` are the hosts on which the model alone is missing: what others have would not start the job. Returns ""
        for none of the three.
        """
        own = sorted({(name, mib) for offer in offers for _, _, name, mib, _ in offer.devices})
        names = list(dict.fromkeys(name for name, _ in own))
        if there := [name for model in shape.models for name in self._names if model_matches(model, name)]:
            if any(name in there for name in names):
                return f"{shown(there)} there are MIG slices, which gpu.profile asks for"
            return f"{shown(there)} are on workers that the rest of the request rules out"
        for model in shape.models:
            if found := spelled(model, own):
                return f"did you mean {found.words}"
        for model in shape.models:
            if found_inside := inside(model, names):
                bare = bare_model(model)
                return f"{bare} is only a part of a word in {shown(found_inside)}; ~{bare} takes that, too"
        return ""

    def nearest_models(self, shape: Shape) -> Iterable[str]:
        """Return the fleet's device names nearest to the requested ones, and if there are others; else all names."""
        models = (name for model in shape.models for name in self._near(bare_model(model).lower()))
        near = dict.fromkeys(models) or self._names
        return [*near, *["others"] * (len(near) < len(self._names))]

    def _near(self, model: str) -> list[str]:
        found = self._close.get(model)
        if found is None:
            lower = {name.lower(): name for name in self._names}
            hits = difflib.get_close_matches(model, lower, n=NAMES_SHOWN_MAX, cutoff=0.3)
            found = self._close.put(model, [lower[hit] for hit in hits])
        return found

    def _of_hosts(self, shape: Shape, classes: list[HostClass]) -> str:
        sizes = [(next(iter(alike.values())), len(alike)) for cls in classes for alike in cls.sizes.values()]
        rooms = sum(host.replicas_of(shape, "ever") * count for host, count in sizes)
        if rooms >= shape.together:
            every = (host for cls in classes for host in cls.hosts.values())
            each = ((host, host.replicas_of(shape, "ever")) for host in every)
            most, where = most_in_one(self._fleet.places(shape), shape, each)
            return f"hosts would hold {most} of its {shape.together} replicas at once{where}{apart(shape)}"
        if rooms:
            return f"the whole fleet would hold {rooms} of its {shape.together} replicas at once{apart(shape)}"
        hosts = [host for host, _ in sizes]
        largest = size_of_largest(hosts, shape)
        with_gpus = " with such GPUs" * bool(shape.gpus)
        return too_few_lent(hosts, shape) or f"the most that one worker{with_gpus} has is {largest} of memory"
