"""The checks of a worker's GPUs: an agent with four simulated GPUs over a real nats-server, and real commands."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.codec import encode
from moorage.schemas.errors import Refused
from moorage.schemas.frames import End, Wanted
from moorage.testing.conformance.leader import Seat
from moorage.worker.agent.gpu_checks import check_startable
from moorage.worker.settings import WorkerSettings
from tests.system.worker.agent.test_agent import World, body, name_of, place, world
from tests.waiting import until

#: notes which GPU it checks, for whom and what it sees, then does what a file of the folder says of that GPU
CHECK = """
gpu=$MOORAGE_GPU_INDICES; echo "$gpu $(id -u) $CUDA_VISIBLE_DEVICES $$" >> {0}/ran
while test -e {0}/wait; do sleep 0.02; done
test ! -e {0}/hangs-$gpu || exec sleep 600
test ! -e {0}/fails-$gpu || {{ echo noise; echo; echo "row 7 differs" >&2; echo; exit 3; }}
"""


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder into which the user of the checks may write, too."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o777)
        yield Path(made)


def checks(folder: Path, **more: Any) -> dict[str, Any]:
    return {"check_command": ("/bin/sh", "-c", CHECK.format(folder)), "check_every": 0.0, **more}


def ran(folder: Path) -> list[list[str]]:
    """The checks that began: GPU, user, what CUDA is shown, process."""
    file = folder / "ran"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def counts(folder: Path) -> Counter[str]:
    return Counter(gpu for gpu, *_ in ran(folder))


def told(seat: Seat) -> list[tuple[int, str, str, bool]]:
    """The devices that the newest renewal has as unwell."""
    return [(each.slot, each.kind, each.detail, each.ends) for each in seat.renewals[-1].unwell]


async def release(w: World, n: int, *slots: int) -> None:
    seat = w.leader.seat("w1")
    frame = Wanted("w1", seat.session, w.leader.epoch, well=list(slots), well_n=n)
    await w.leader.nc.publish(w.leader.subjects.worker("w1", "wanted"), encode(frame, json=seat.is_json))


async def test_a_gpu_that_fails_is_closed_alone_until_it_is_released_which_has_it_checked_again(
    nats_url: str, unique: str, tmp_path: Path, open_dir: Path
) -> None:
    (open_dir / "fails-1").touch()
    (open_dir / "wait").touch()
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add(**checks(open_dir))
        seat = await w.leader.joined("w1")
        assert [state.local for state in agent.pool.slot_states()] == [True] * 4, "claimed before a job can come"
        (open_dir / "wait").unlink()
        await until(lambda: told(seat) == [(1, "check", "row 7 differs", False)], what="GPU 1 is told as closed")
        await until(lambda: agent.pool.busy_slots() == [1], what="the others are in use")
        user = str(pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid())
        assert sorted(row[:3] for row in ran(open_dir)) == [[gpu, user, gpu] for gpu in "0123"]

        await release(w, 1, 1)
        await until(lambda: counts(open_dir)["1"] == 2, what="a release has it checked")
        await until(lambda: agent.watch.told and not agent.pool.slot_states()[1].local, what="it fails again")
        (open_dir / "fails-1").unlink()
        await release(w, 2, 1)
        await until(lambda: counts(open_dir)["1"] == 3 and not agent.pool.busy_slots(), what="mended, it is in use")
        await until(lambda: told(seat) == [], what="and told as well")
        assert counts(open_dir) == Counter({"0": 1, "1": 3, "2": 1, "3": 1})


async def test_a_check_that_does_not_end_is_killed_and_has_failed(
    nats_url: str, unique: str, tmp_path: Path, open_dir: Path
) -> None:
    for slot in range(4):
        (open_dir / f"hangs-{slot}").touch()
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add(**checks(open_dir, check_timeout=0.5))
        seat = await w.leader.joined("w1")
        hung = [(slot, "check", "the check did not end within 0.5 s", False) for slot in range(4)]
        await until(lambda: told(seat) == hung, what="all are closed")
        await until(lambda: not any(state.local for state in agent.pool.slot_states()), what="the leases are over")
        assert not [pid for *_, pid in ran(open_dir) if Path("/proc", pid).exists()]


async def test_an_agent_that_ends_ends_its_checks_without_a_verdict(
    nats_url: str, unique: str, tmp_path: Path, open_dir: Path
) -> None:
    (open_dir / "hangs-0").touch()
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add(**checks(open_dir))
        await w.leader.joined("w1")
        await until(lambda: counts(open_dir)["0"] and agent.pool.busy_slots() == [0], what="one check is left")
    pid = next(pid for gpu, *_, pid in ran(open_dir) if gpu == "0")
    await until(lambda: not Path("/proc", pid).exists(), what="its process is gone")
    assert (agent.watch.told, agent.pool.busy_slots()) == ([], [])


async def test_no_check_runs_beside_a_job_and_one_that_is_due_follows_it(
    nats_url: str, unique: str, tmp_path: Path, open_dir: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add(**checks(open_dir, check_on_join=False))
        seat = await w.leader.joined("w1")
        await w.leader.want("w1", place(name_of(), body("hang")))
        await w.leader.await_report("w1", "started", name_of())
        for slot in (0, 1):
            agent.watch.check_failed(slot, "as before", agent.now())
        agent.reporter.health_changed()
        await until(lambda: len(told(seat)) == 2, what="both are closed")
        await release(w, 1, 0, 1)
        await until(lambda: counts(open_dir)["1"] and not agent.pool.busy_slots(), what="the idle one was checked")
        assert counts(open_dir)["0"] == 0
        await w.leader.want("w1", End(*name_of(), "cancelled"))
        await w.leader.await_report("w1", "freed", name_of())
        await until(lambda: counts(open_dir)["0"] == 1, what="the other one, once the job is over")


async def test_each_gpu_is_checked_again_and_again(nats_url: str, unique: str, tmp_path: Path, open_dir: Path) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        await w.add(**checks(open_dir, check_on_join=False, check_every=0.2))
        await until(lambda: all(counts(open_dir)[gpu] >= 2 for gpu in "0123"), what="each twice")


async def test_a_check_that_cannot_start_closes_nothing_and_is_a_fault_of_the_settings(
    nats_url: str, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add(check_command=("/no/such/check",))
        await w.leader.joined("w1")
        await until(lambda: "cannot start, and closes nothing" in caplog.text, what="it is told")
        await until(lambda: not agent.pool.busy_slots(), what="all are in use")
        assert agent.watch.told == []
        with pytest.raises(Refused, match="names the program /no/such/check, and this host has none"):
            check_startable(agent.settings)
    check_startable(WorkerSettings(tmp_path, check_command=("python", "-m", "moorage.worker.check_gpu")))
    with pytest.raises(ValueError, match="the driver vm has the GPUs elsewhere"):
        WorkerSettings(tmp_path, check_command=("true",), drivers=("process", "vm"))


#: the part of libcuda.so.1 that the check uses, on memory of the host; FLIPS spoils one bit of what is read
CUDA = """
#include <stdlib.h>
#include <string.h>
typedef unsigned long long u64;
int cuInit(unsigned f) { return getenv("NO_DEVICE") ? 100 : 0; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuDeviceGet(int *device, int n) { *device = n; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, "Stub"); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &context; return 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
int cuMemAlloc_v2(u64 *at, size_t size) { *at = (u64)malloc(size); return 0; }
int cuMemcpyHtoD_v2(u64 to, const void *from, size_t size) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoD_v2(u64 to, u64 from, size_t size) { memcpy((void *)to, (void *)from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, u64 from, size_t size) {
    memcpy(to, (void *)from, size);
    if (getenv("FLIPS")) ((char *)to)[size - 1] ^= 4;
    return 0;
}
int cuMemsetD32_v2(u64 at, unsigned word, size_t count) {
    for (size_t n = 0; n < count; n++) ((unsigned *)at)[n] = word;
    return 0;
}
"""


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({"MOORAGE_GPU_UUIDS": "SIM-1"}, 0, "a simulated GPU: nothing was checked"),
        ({}, 0, "Stub copied and set its memory as it should, by the CUDA driver"),
        ({"FLIPS": "1"}, 1, "numbers that were copied to the GPU and back are others"),
        ({"NO_DEVICE": "1"}, 1, "cuInit: CUDA_ERROR_NO_DEVICE (100)"),
    ],
    ids=["simulated", "well", "flips a bit", "no device"],
)
def test_the_shipped_check_compares_what_it_reads(
    variables: dict[str, str], code: int, said: str, tmp_path: Path
) -> None:
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    (tmp_path / "cuda.c").write_text(CUDA)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"], check=True)
    (tmp_path / "torch.py").write_text("class version:\n    cuda = hip = None\n")  # PyTorch for processors alone
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(tmp_path), **variables}
    command = [sys.executable, "-m", "moorage.worker.check_gpu"]
    check = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (check.returncode, check.stdout, check.stderr) == (code, said + "\n", "")
