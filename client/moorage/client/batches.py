"""Order the requests of one `submit_many` by their dependencies, and pack them into few frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from moorage.schemas.codec import FRAME_BYTES_MAX
from moorage.schemas.job import Request

#: most requests that the scheduler takes in one frame
BATCH_MAX: Final = 10_000


def frames_of(bodies: Iterable[bytes]) -> list[bytes]:
    """Return these bodies as JSON arrays, as few as the bounds allow."""
    frames: list[bytes] = []
    part: list[bytes] = []
    size = 2
    for body in bodies:
        if part and (len(part) >= BATCH_MAX or size + len(body) + 1 > FRAME_BYTES_MAX):
            frames.append(b"[" + b",".join(part) + b"]")
            part, size = [], 2
        part.append(body)
        size += len(body) + 1
    if part:
        frames.append(b"[" + b",".join(part) + b"]")
    return frames


def in_order(requests: Sequence[Request]) -> tuple[list[int], list[str]]:
    """Return the places of these requests in an order in which none comes before one that it names in `after`, and the
    ids of jobs that wait for each other in a circle; [] for none.

    A scheduler takes a request that names a job only once it knows that job. Without `after`, the order stays.
    """
    if not any(request.after for request in requests):
        return list(range(len(requests))), []
    from graphlib import CycleError, TopologicalSorter

    known = {request.job: at for at, request in enumerate(requests)}
    graph = {
        at: [known[each.job] for each in request.awaited if each.job in known] for at, request in enumerate(requests)
    }
    try:
        return list(TopologicalSorter(graph).static_order()), []
    except CycleError as error:
        # each comes before the next in the sorter's words: it is the next that waits
        return [], [str(requests[at].job) for at in reversed(error.args[1])]
