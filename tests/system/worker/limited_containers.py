"""Two containers with a share each in a real engine: each sees its part, is held to it, and has its own segment."""

from __future__ import annotations

from typing import Any, Final, Protocol

from moorage.schemas.attempt import AttemptName
from moorage.schemas.gpu import GpuSpec, Share
from moorage.worker.session.attempt_messages import Ended
from moorage.worker.sharing.limiter.limits import Limits
from tests.waiting import until

GIB: Final = 1 << 30
#: by job: the part that it has
PARTS: Final = {"half": GIB, "whole": 2 * GIB}


class Rig(Protocol):
    """What the rigs of docker and of podman have in common."""

    driver: Any

    def start(self, job: str, *argv: str, **run: Any) -> AttemptName: ...
    async def reported(self, kind: type, name: AttemptName) -> Any: ...
    def live_output(self, name: AttemptName, stream: str = "out") -> str: ...


async def limited_containers(rig: Rig, limits: Limits | None) -> None:
    """Run both at once, see what they say and what the worker counts of them, and end them."""
    assert limits is not None
    names: dict[AttemptName, int] = {}
    for job, part in PARTS.items():
        words = ("/built/app", "link", "info", f"alloc={part + 1}", f"alloc={part}", "alloc=1", "stay")
        gpu = GpuSpec(sharing="time-slice", share=Share(memory_mib=part >> 20))
        names[rig.start(job, *words, env={"LD_LIBRARY_PATH": "/built"}, gpu=gpu)] = part
    for name, part in names.items():
        said = f"{part} of {part}\n2\n0\n2\n"

        def has_said(name: AttemptName = name, said: str = said) -> bool:
            return rig.live_output(name) == said

        await until(has_said, deadline_s=90, what=f"{said!r} of {name[1]}")
        await until(lambda name=name, part=part: limits.segments[name].used(0) == part, deadline_s=90)
    folder = limits._folder
    assert len(list(folder.iterdir())) == len(PARTS), "a segment an attempt"
    for name in names:
        rig.driver.end(name, 1.0, "end")
        assert (await rig.reported(Ended, name))[0] == name
    await until(lambda: not any(folder.iterdir()), deadline_s=90, what="no segment is left")
