"""A service that transcodes clips: for the fleet when a job asks for it, for itself in between, on the same GPUs.

    python docs/examples/transcoder.py --worker transcoder-1 --own 3

and then, from a service of another team,

    with Client() as moorage:
        job = moorage.submit_handler("transcode", {"frames": 48, "width": 320, "height": 240}, gpu=1)
        print(job.result(on_progress=print).value)

or from any NATS client

    nats req moorage.api.default.submit '{"gpu": {}, "requires": {"handler.transcode": ["1"]},
      "run": {"driver": "handler", "argv": ["transcode"]}, "driver_config": {"handler": {"input": {"frames": 48}}}}'

It draws frames as PPM pictures, mirrors them, brightens them and packs them with zlib: real work for one core, which a
real service would hand to its encoder together with the lease's device. Where the host has no GPU the pool's `claim()`
gives None, and the service does its own clips on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import signal
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from moorage.worker import EmbeddedWorker, HandlerContext, WorkerSettings

FRAMES_MAX: Final = 10_000
SIDE_MAX: Final = 4096
#: every brightness, made a third brighter
BRIGHTER: Final = bytes(min(255, value * 4 // 3) for value in range(256))


@dataclass(frozen=True)
class Clip:
    """Which pictures: `frames` of `width` x `height` pixels, packed with zlib's `level` 0..9."""

    frames: int
    width: int = 160
    height: int = 120
    level: int = 6

    def __post_init__(self) -> None:
        if not (1 <= self.frames <= FRAMES_MAX and 1 <= self.width <= SIDE_MAX and 1 <= self.height <= SIDE_MAX):
            raise ValueError(f"a clip has 1..{FRAMES_MAX} frames of 1..{SIDE_MAX} pixels a side, found {self}")


@dataclass(frozen=True)
class Transcoded:
    """What became of a clip. `digest` is SHA-256 over the packed frames; `device` is a GPU's uuid, or cpu."""

    device: str
    frames: int
    bytes_in: int
    bytes_out: int
    digest: str


def draw(clip: Clip, number: int) -> bytes:
    """A colour gradient that moves from frame to frame, as a binary PPM."""
    rows = [
        bytes(channel for x in range(clip.width) for channel in ((x + number) & 255, (y * 2) & 255, (x ^ y) & 255))
        for y in range(clip.height)
    ]
    return b"P6\n%d %d\n255\n" % (clip.width, clip.height) + b"".join(rows)


def mirror_and_brighten(clip: Clip, picture: bytes) -> bytes:
    """Each row from right to left, each pixel a third brighter."""
    header, row_bytes = len(picture) - 3 * clip.width * clip.height, 3 * clip.width
    pixels = picture[header:].translate(BRIGHTER)
    rows = (pixels[at : at + row_bytes] for at in range(0, len(pixels), row_bytes))
    mirrored = (b"".join(row[at : at + 3] for at in range(row_bytes - 3, -1, -3)) for row in rows)
    return picture[:header] + b"".join(mirrored)


def transcode(clip: Clip, device: str, after_frame: Callable[[float], None] = lambda fraction: None) -> Transcoded:
    """All of a clip. `after_frame` hears how far it is, 0..1, and may raise to stop."""
    digest, bytes_in, bytes_out = hashlib.sha256(), 0, 0
    for number in range(clip.frames):
        picture = draw(clip, number)
        packed = zlib.compress(mirror_and_brighten(clip, picture), clip.level)
        digest.update(packed)
        bytes_in += len(picture)
        bytes_out += len(packed)
        after_frame((number + 1) / clip.frames)
    return Transcoded(device, clip.frames, bytes_in, bytes_out, digest.hexdigest())


# ------------------------------------------------------------------------------------------------- for the fleet


def transcode_job(context: HandlerContext) -> dict[str, object]:
    """The input has the fields of a `Clip`; what is wrong with it is why the job fails."""
    clip = msgspec.convert(context.input, Clip)

    def after_frame(fraction: float) -> None:
        context.progress(fraction, f"frame {round(fraction * clip.frames)} of {clip.frames}")
        context.raise_if_cancelled()

    return asdict(transcode(clip, context.uuids[0] if context.uuids else "cpu", after_frame))


# -------------------------------------------------------------------------------------------- for the service itself


async def transcode_own(worker: EmbeddedWorker, clip: Clip) -> Transcoded:
    """In line with the fleet's jobs for a GPU of this host, first come, first served; on the CPU where it has none."""
    lease = await worker.pool.claim()
    if lease is None:
        return await asyncio.to_thread(transcode, clip, "cpu")
    async with lease:
        return await asyncio.to_thread(transcode, clip, lease.uuid)


async def main(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    settings = WorkerSettings(arguments.state, arguments.worker, arguments.prefix, simulate=arguments.simulate)
    worker = EmbeddedWorker(arguments.nats, settings)
    worker.handler("transcode")(transcode_job)
    async with worker:
        for number in range(arguments.own):
            done = await transcode_own(worker, Clip(24))
            print(f"own clip {number} on {done.device}: {done.bytes_in} bytes became {done.bytes_out}", flush=True)
        await worker.serve(stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Transcode clips, for the fleet and for oneself.")
    parser.add_argument("--nats", default=None, help="a NATS URL or context; none: the selected context")
    parser.add_argument("--prefix", default="moorage", help="of the subjects")
    parser.add_argument("--worker", default="transcoder", help="this service's worker id")
    parser.add_argument("--state", type=Path, default=Path("transcoder-state"), help="folder for what it keeps")
    parser.add_argument("--simulate", default=None, help="simulated devices, such as 2xL40S or cpu")
    parser.add_argument("--own", type=int, default=0, help="clips of its own to transcode first")
    asyncio.run(main(parser.parse_args()))
