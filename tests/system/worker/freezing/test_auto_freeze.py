"""Jobs that are frozen for want of use and resumed by their first use: a real worker, over NVML and CUDA as stubs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.frames import End, Freeze, Place
from moorage.worker.freezing import cuda
from moorage.worker.sharing.limiter import limits
from tests.nvidia.limited import built
from tests.nvidia.stub import Board, libraries
from tests.system.worker.sharing.test_memory_guard import GPU, OTHER, scene
from tests.waiting import until

NAME: AttemptName = ("acme", "train", 0, 1, 10)
#: allocates, then once more for each line that comes into the file `asked`
WORKS = """
import ctypes, os, sys, time
folder = sys.argv[1]
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer, done = ctypes.c_void_p(), ctypes.c_ulonglong(), 0
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
cuda.cuCtxSetCurrent(context)
while True:
    code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20))
    with open(folder + "/done", "a") as file:
        file.write(str(code) + "\\n")
    done += 1
    while done > len(open(folder + "/asked").read()):
        time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.xdist_group("limiter")
async def test_fact_60_an_unused_job_is_frozen_and_its_next_call_has_it_resumed_before_it_proceeds(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = built() / "limiter.bin"
    monkeypatch.setattr(limits, "LIBRARY", library)

    monkeypatch.setattr(cuda, "LIBRARY", str(libraries() / "libcuda.so.1"))
    settings: dict[str, Any] = {
        "limiter": True, "auto_freeze": True, "auto_freeze_s": {"medium": 2}, "idle_warn_s": 0,
    }  # fmt: skip
    async with scene(nats_url, unique, tmp_path, Board(GPU), Board(OTHER), **settings) as one:
        seat, session = one.leader.seat("w1"), one.agent.attempts.session
        await until(lambda: session.phase == "live", what="the answer to the join")
        work = tmp_path / "work"
        work.mkdir()
        (work / "asked").write_text("")
        done = work / "done"

        def said(kind: str) -> int:
            return sum(report.kind == kind for report in seat.reports)

        def away() -> int:
            return len(list((one.stub.folder / "away").iterdir()))

        run = {"argv": [sys.executable, "-c", WORKS, str(work)], "env": one.stub.environment, "grace_s": 20}
        await one.leader.want("w1", Place(*NAME, [0], "exclusive", False, encode({"gpu": {}, "run": run})))
        await until(lambda: done.exists() and done.read_text() == "0\n", what="it has allocated")
        report = await one.leader.await_report("w1", "freeze-due", NAME)
        assert report.code >= 2
        await one.leader.want("w1", Freeze(*NAME, True))
        await one.leader.await_report("w1", "frozen", NAME)
        assert (away(), said("resume-due")) == (1, 0)

        await one.restart()  # the next agent watches it, too
        await one.leader.joined("w1", 2)
        (work / "asked").write_text("x")
        await one.leader.await_report("w1", "resume-due", NAME)
        assert (away(), done.read_text()) == (1, "0\n"), "it waits"
        await one.leader.want("w1", Freeze(*NAME, False, 1))
        await one.leader.await_report("w1", "resumed", NAME)
        await until(lambda: done.read_text() == "0\n0\n", what="its call proceeds")
        assert (away(), said("resume-due")) == (0, 1)

        one.stub.extra = ("checkpoint-fail call=Checkpoint code=801",)
        one.stub.write()
        await one.leader.want("w1", Freeze(*NAME, True))
        await one.leader.await_report("w1", "not-frozen", NAME)
        (work / "asked").write_text("xx")
        await until(lambda: done.read_text() == "0\n" * 3, what="a call passes where freezing has failed")
        await one.leader.want("w1", End(*NAME, "cancelling"))
        await one.leader.await_report("w1", "freed", NAME)
