"""The places of a fleet: hosts with one value of each label of which the ranks of a gang share the values.

What else is asked of all hosts, as where a shape fits, is asked once for each place of such a gang, with a shape that
fits the hosts of that place alone (`Shape.at`). A host without a label that the gang names itself is in no place; those
without a `site` are a place of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from moorage.scheduler.core.fleet.host import Host, HostClass
from moorage.scheduler.core.fleet.shape import Place, Shape
from moorage.schemas.memo import Memo
from moorage.schemas.where import ANY, SITE

#: shapes of which the places are known
SHAPES_MAX: Final = 256
_SITE_ALONE: Final = (SITE,)


class Places:
    """The places of one fleet, by shape. All that is known is dropped when hosts come, leave or change classes.

    `distinguish` puts hosts that differ in a shape's labels into different classes, and `inventory` grows with that.
    """

    def __init__(
        self,
        classes: Mapping[Any, HostClass],
        labelled: Mapping[str, object],
        distinguish: Callable[[Shape], None],
        inventory: Callable[[], int],
    ) -> None:
        self._all = classes
        self._labelled = labelled
        self._distinguish = distinguish
        self._inventory = inventory
        self._as_of = -1
        self._by_labels: dict[tuple[str, ...], dict[Place, list[HostClass]]] = {}
        self._shapes: Memo[Shape, tuple[Shape, ...]] = Memo(SHAPES_MAX)

    def of(self, shape: Shape) -> tuple[Shape, ...]:
        """Return shapes that fit the hosts of one place each, for all places of a shape, in a stable order.

        The shape itself alone, if its ranks may run anywhere, as where no worker has a `site`. The others may be used
        until hosts come, leave or change classes.
        """
        if not shape.same or (shape.same == _SITE_ALONE and SITE not in self._labelled):
            return (shape,)
        return self.each(shape)

    def each(self, shape: Shape) -> tuple[Shape, ...]:
        """Return the same, also where no worker has a `site`: then all hosts are one place."""
        self._distinguish(shape)
        self._look()
        found = self._shapes.get(shape)
        if found is None:
            named = {each.label for each in shape.where if each.sign == ANY}
            places = [place for place in self._of_labels(shape.same) if _has(place, named)]
            found = self._shapes.put(shape, tuple(map(shape.at, places)))
        return found

    def classes(self, place: Place) -> Sequence[HostClass]:
        """Return the classes of the hosts of a place."""
        self._look()
        return self._of_labels(place.labels).get(place, ())

    def _look(self) -> None:
        if self._as_of != self._inventory():
            self._as_of = self._inventory()
            self._by_labels.clear()
            self._shapes.clear()

    def _of_labels(self, labels: tuple[str, ...]) -> dict[Place, list[HostClass]]:
        found = self._by_labels.get(labels)
        if found is None:
            rows: dict[Place, list[HostClass]] = {}
            for cls in self._all.values():
                rows.setdefault(Place(labels, tuple(map(cls.labels.get, labels))), []).append(cls)
            order = sorted(rows, key=lambda place: [(value is not None, value or "") for value in place.values])
            found = self._by_labels[labels] = {place: rows[place] for place in order}
        return found


def _has(place: Place, named: set[str]) -> bool:
    """Return whether the hosts of a place have these labels."""
    return not any(value is None and label in named for label, value in zip(*place, strict=True))


def most_in_one(places: Sequence[Shape], shape: Shape, rooms: Iterable[tuple[Host, int]]) -> tuple[int, str]:
    """Return how many of a shape's replicas hosts hold that it may take together, given how many each of them holds.

    Where all of them have to be in one of these places, that is the place with the most, and the text names it.
    """
    if not shape.same or places == (shape,):
        return sum(room for _, room in rooms), ""
    found = {place.place: 0 for place in places}
    for host, room in rooms:
        place = Place(shape.same, tuple(map(host.labels.get, shape.same)))
        if place in found:
            found[place] += room
    best = max(found, key=lambda place: found[place], default=None)
    return (0, "") if best is None else (found[best], f", the most in one place ({best})")
