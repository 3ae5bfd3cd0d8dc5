"""Pack the requests of one `submit_many` into as few frames as the bounds allow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moorage.schemas.codec import FRAME_BYTES_MAX

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
