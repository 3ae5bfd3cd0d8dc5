"""The rankers by the names that the setting `ranker` takes."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.rank.ranker import Pack, Ranker
from moorage.schemas.own_class import is_own, own_class

#: where each is; all but `pack` are in a package beside the scheduler, which may be missing
PLACES: Final = {
    "fragments": "moorage.ranking.fragments:Fragments",
    Pack.name: f"{Pack.__module__}:{Pack.__name__}",
    "headroom": "moorage.ranking.headroom:Headroom",
}


def ranker_class(name: str) -> type[Ranker]:
    """Import and return the ranker of this name: one of `PLACES`, or `module:Class`.

    Raises ValueError if there is no ranker of this name, or the class cannot be imported or is no ranker.
    """
    place = PLACES.get(name, name)
    if not is_own(place):
        raise ValueError(f"ranker must be {', '.join(PLACES)}, or module:Class of your own, found {name!r}")
    return own_class(place, Ranker)


def why_missing(name: str) -> str:
    """Return why the ranker of this name cannot be used here; empty if it can."""
    try:
        ranker_class(name)
    except ValueError as error:
        return str(error)
    return ""
