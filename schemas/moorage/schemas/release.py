"""The release of moorage, and which releases work together: a scheduler and its workers at most one minor version
apart.

`RELEASE` is the one place that has the version: of the release that this tree is, or becomes. `moorage.system.build`
adds the commit, for the package's metadata and for frames. Patch versions and their suffixes (rc1, .dev3, +local) make
no difference.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from moorage.schemas.errors import Problem

RELEASE: Final = "0.3.0"
#: the last minor version of each major one that has a successor: {0: 9} makes 0.9 and 1.0 neighbours, here and there
LAST_MINOR: Final[dict[int, int]] = {}

_RELEASE: Final = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})(?:\.[0-9]{1,6})?(?:[.+a-z-][0-9A-Za-z.+-]{0,64})?")


def minor_of(release: str) -> tuple[int, int] | None:
    """Return (major, minor) of `0.2.0`, `0.2` or `0.2.0rc1`; None for what is no release."""
    found = _RELEASE.fullmatch(release)
    return (int(found[1]), int(found[2])) if found else None


def minors_apart(one: tuple[int, int], other: tuple[int, int], last_minor: dict[int, int] = LAST_MINOR) -> int | None:
    """Return by how many minor releases two differ: 0 for the same one, 1 for neighbors.

    Return None across more than one major version, or if `last_minor` lacks the last minor release of the lower one.
    """
    (low, high) = sorted((one, other))
    if low[0] == high[0]:
        return high[1] - low[1]
    if high[0] - low[0] != 1 or low[0] not in last_minor:
        return None
    return max(0, last_minor[low[0]] - low[1]) + 1 + high[1]


@functools.lru_cache(maxsize=256)
def release_problem(found: str, ours: str = RELEASE) -> Problem | None:
    """Return why a worker of release `found` may not work with a scheduler of release `ours`; None if it may.

    A worker that names no release is not one of moorage's own; for it, only the protocol's version in its frames
    counts.
    """
    from moorage.schemas.errors import problem  # `moorage --version` needs none of it

    if not found:
        return None
    theirs, own = minor_of(found), minor_of(ours)
    if theirs is None or own is None:
        return problem(
            "invalid-argument",
            "a release must be major.minor.patch, or left out",
            field="$.hello.release",
            found=found,
            allowed=f"such as {ours}",
            next="leave it out, if this worker is not moorage's own",
        )
    apart = minors_apart(theirs, own)
    if apart is not None and apart <= 1:
        return None
    upgrade = "this worker" if theirs < own else "the schedulers"
    return problem(
        "release-apart",
        f"the worker runs moorage {found}, the scheduler {ours}: they must be at most one minor version apart;"
        f" upgrade {upgrade}",
        field="$.hello.release",
        found=found,
        allowed=_neighbours(own),
        next="upgrade one minor version at a time: first every scheduler, then the workers",
    )


def _neighbours(own: tuple[int, int]) -> str:
    major, minor = own
    if minor:
        before = f"{major}.{minor - 1}"
    else:
        before = f"{major - 1}.{LAST_MINOR[major - 1]}" if major - 1 in LAST_MINOR else f"{major}.0"
    after = f"{major + 1}.0" if LAST_MINOR.get(major) == minor else f"{major}.{minor + 1}"
    return f"{before} to {after}"
