"""The rankers by the names that the setting `ranker` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.rank.headroom import Headroom
from moorage.scheduler.core.rank.ranker import Pack, Ranker
from moorage.schemas.own_class import is_own, own_class


def _fragments() -> Ranker:
    from moorage.scheduler.core.rank.fragments import Fragments  # loads numpy

    return Fragments()


RANKERS: Final[dict[str, Callable[[], Ranker]]] = {
    "pack": Pack,
    "fragments": _fragments,
    "headroom": Headroom,
}

#: rankers of release 0.2, kept for comparison: name -> class in the module `MOVED_TO` of the source tree
MOVED: Final = {
    "random": "Random",
    "best-fit": "BestFit",
    "dot-product": "DotProduct",
    "gpu-packing": "GpuPacking",
    "gpu-clustering": "GpuClustering",
    "fgd": "Fgd",
}
MOVED_TO: Final = "bench.placement.classic"


def maker_of(name: str) -> Callable[[], Ranker]:
    """Return a factory for the ranker of this name: one of `RANKERS`, or `module:Class`.

    Raises ValueError if there is no ranker of this name, or the class cannot be imported or is no ranker.
    """
    if is_own(name):
        return own_class(name, Ranker)
    if name in RANKERS:
        return RANKERS[name]
    says = f"ranker must be {', '.join(RANKERS)}, or module:Class of your own, found {name!r}"
    if name in MOVED:
        says += (
            f", which moved out of moorage: it is {MOVED_TO}:{MOVED[name]} with the root of moorage's source tree on"
            " PYTHONPATH"
        )
    raise ValueError(says)
