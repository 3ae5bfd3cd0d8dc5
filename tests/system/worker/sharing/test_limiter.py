"""The limiter: real processes under it, with a driver of this tree's own in the place of NVIDIA's."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.worker.sharing.limiter import segment
from moorage.worker.sharing.limiter.segment import SIZE, TOKEN, Counts, Part, Segment, SegmentError, owner_of
from tests.nvidia import limited as limited_module
from tests.nvidia import real_driver
from tests.nvidia.limited import TOTAL, Limited, limited, uuid_of
from tests.nvidia.stub import Board, Stub

GIB = 1 << 30
LIMITER = Path(limited_module.__file__).parents[2] / "worker/moorage/worker/sharing/limiter"
#: the groups of calls by which programs find the driver's functions
ROUTES = ("link", "dlsym", "proc", "proc-ptsz")
pytestmark = pytest.mark.xdist_group("limiter")  # what it needs is compiled once

BY_CTYPES = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)
for size in (2**30 + 1, 2**30, 1, 2**64 - 1):
    print(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
"""


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Limited]:
    """A job that may have 1 GiB of the first device."""
    made = Limited(tmp_path, limited(GIB))
    yield made
    made.close()


def kill_and_wait(pid: int) -> None:
    """Kill a process, which need not be a child of ours, and return once it has ended."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], 60)[0], f"process {pid} was killed and has not ended"
    finally:
        os.close(pidfd)


def many(folder: Path, *parts: Part) -> Limited:
    folder.mkdir(exist_ok=True)
    return Limited(folder, *parts)


@pytest.mark.parametrize("route", ROUTES)
def test_fact_55_the_limit_is_allowed_and_a_byte_more_is_denied(one: Limited, route: str) -> None:
    words = (f"alloc={GIB + 1}", f"alloc={GIB}", "alloc=1", f"alloc={2**64 - 1}", "info", "free=0", "info", "alloc=7")
    said = one.said(*words, route=route)
    assert said == ["2", "0", "2", "2", f"0 of {GIB}", "0", f"{GIB} of {GIB}", "0"]
    assert one.held()[1] == GIB
    assert one.segment.counts().attached == 1
    assert one.segment.counts().refused == 3


@pytest.mark.slow
def test_a_program_in_python_is_held_to_the_limit(one: Limited) -> None:
    assert one.outputs([sys.executable, "-c", BY_CTYPES]) == ["2", "0", "2", "2"]


@pytest.mark.slow
def test_the_functions_of_old_versions_are_held_too(one: Limited) -> None:
    assert one.said(f"old={GIB + 1}", f"old={GIB}", "old=1", route="proc-old")[:3] == ["2", "0", "2"]
    assert one.said("info", "old=1", route="proc")[0] == f"{GIB} of {GIB}", "its predecessor is gone, and with it all"


@pytest.mark.slow
def test_the_part_is_told_in_place_of_the_device_and_never_more_than_there_is(tmp_path: Path) -> None:
    small, large, none = (many(tmp_path / str(n), limited(n)) for n in (GIB, 4 * TOTAL, 0))
    assert small.said("info", "total=0", "total=1") == [f"{GIB} of {GIB}", str(GIB), str(TOTAL)]
    assert large.said("info", "total=0") == [f"{TOTAL} of {TOTAL}", str(TOTAL)]
    assert none.said("info", f"alloc={2 * GIB}", "info") == [
        f"{TOTAL} of {TOTAL}",
        "0",
        f"{TOTAL - 2 * GIB} of {TOTAL}",
    ]
    small.segment.set_limit(0, 100)
    assert small.said("alloc=100", "info") == ["0", "0 of 100"], "a limit is changed while the job runs"


@pytest.mark.slow
def test_free_memory_is_never_less_than_nothing(one: Limited) -> None:
    with one.running(f"alloc={GIB}", "stay", says=1):
        one.segment.set_limit(0, GIB // 2)
        assert one.said("info", "alloc=1") == [f"0 of {GIB // 2}", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("managed={}", "free=0"), ("async={}", "freeasync=0"), ("pool={}", "freeasync=0"), ("async={}", "free=0"),
        ("array=1024,262144", "destroy=0"), ("create={},0", "release=0"), ("pitch=1024,1048576", "free=0"),
        ("alloc={}", "leave=0"), ("alloc={}", "reset=0"), ("alloc={}", "ctxdestroy=0"),
    ],
    ids=lambda words: words[0].partition("=")[0] + "-" + words[1],
)  # fmt: skip
@pytest.mark.parametrize("route", ["link", "proc-ptsz"])
def test_every_kind_of_memory_counts_until_it_is_free(one: Limited, words: tuple[str, str], route: str) -> None:
    takes, gives = words
    said = one.said(takes.format(GIB), "alloc=1", gives, "info", route=route)
    assert said[:2] == ["0", "2"]
    assert said[3] == f"{GIB} of {GIB}"


@pytest.mark.slow
def test_a_pitch_that_the_driver_chose_counts(one: Limited) -> None:
    # quick.c aligns rows to 1024 bytes, of which 1 is asked for
    rows = GIB // 1024
    assert one.said(f"pitch=1,{rows + 1}", f"pitch=1,{rows}", "alloc=1", "free=0", "info")[:3] == ["2", "0", "2"]
    assert one.held()[0] >= 0


@pytest.mark.slow
def test_memory_by_handles_counts_until_its_last_reference_and_mapping(tmp_path: Path) -> None:
    """The calls of NCCL and of growing segments: create, map, export, import, release before unmap."""
    job = many(tmp_path, limited(GIB, 0), limited(2 * GIB, 1))
    said = job.said(
        f"create={GIB + 1},0", f"create={GIB},0", f"create={2 * GIB},1", "alloc=1", "map=0,4096", "map=0,8192",
        "release=0", "alloc=1", "unmap=4096,4096", "alloc=1", "retain=8192", "unmap=0,100000", "alloc=1", "release=2",
        "info", "device=1", "info", "import", "release=3", "info",
    )  # fmt: skip
    full, empty = f"0 of {2 * GIB}", f"{GIB} of {GIB}"
    assert said == [
        "2", "0", "0", "2", "0", "0", "0", "2", "0", "2", "0", "0", "2", "0", empty, "0", full, "0", "0", full,
    ]  # fmt: skip


@pytest.mark.slow
def test_memory_of_the_host_and_of_other_devices_does_not_count(one: Limited) -> None:
    assert one.said(f"create={2 * GIB},99", f"create={2 * GIB},3", "info")[:3] == ["0", "0", f"{GIB} of {GIB}"]


@pytest.mark.slow
def test_a_context_counts_for_each_process_and_device(tmp_path: Path) -> None:
    job = many(tmp_path, limited(1000, context_bytes=300))
    with job.running("alloc=100", "stay", says=1):
        assert job.segment.used(0) == 100
        assert job.said("alloc=301", "alloc=300", "info") == ["2", "0", "0 of 1000"]


def tell(job: Limited, held: dict[int, int]) -> None:
    """Tell what NVML says that processes hold of the first device, by pid."""
    reading = job.segment.begin_reading()
    job.segment.write_held(reading, 0, {slot.owner: held[slot.pid] for slot in reading.slots if slot.pid in held})


@pytest.mark.slow
def test_what_nvml_says_counts_in_the_place_of_a_guess(tmp_path: Path) -> None:
    job = many(tmp_path, limited(1000, context_bytes=300))
    with job.running("alloc=100", "stay", says=1) as process:
        tell(job, {process.pid: 100 + 200})
        assert job.said("alloc=401", "info") == ["2", "400 of 1000"], "a context of 200, and a guess of 300"
        job.segment.write_others(0, 50)
        assert job.said("alloc=351", "alloc=350") == ["2", "0"], "what a process without a slot holds counts too"
        tell(job, {process.pid: 0})
        assert job.said("info") == ["550 of 1000"], "no less than what it counts itself, and nothing that was freed"


@pytest.mark.slow
def test_what_a_driver_keeps_of_a_process_goes_with_it(one: Limited) -> None:
    with one.running("alloc=100", "stay", says=1) as process:
        tell(one, {process.pid: GIB // 2})
        assert one.said("info") == [f"{GIB // 2} of {GIB}"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert one.said("info") == [f"{GIB} of {GIB}"]


@pytest.mark.slow
def test_memory_of_a_pool_is_of_the_device_of_the_pool_or_the_stream(tmp_path: Path) -> None:
    job = many(tmp_path, limited(GIB, 0), limited(2 * GIB, 1))
    words = (f"stream={GIB},1", f"pool={GIB},1", "stream=1,1", "pool=1,1", f"alloc={GIB}", "pool=1,0", "info")
    assert job.said(*words, "freeasync=0", "stream=1,1") == ["0", "0", "2", "2", "0", "2", f"0 of {GIB}", "0", "0"]


@pytest.mark.slow
def test_what_a_pool_keeps_counts_once_and_is_given_up_for_others(one: Limited) -> None:
    half = GIB // 2
    said = one.said(
        "keeps=0", f"async={GIB}", "freeasync=0", "info", f"async={half}", f"async={half}", "alloc=1", "freeasync=1",
        f"alloc={half}", "info",
    )  # fmt: skip
    assert said == ["0", "0", "0", f"0 of {GIB}", "0", "0", "2", "0", "0", f"0 of {GIB}"]
    assert one.held()[1] == GIB


@pytest.mark.slow
def test_memory_of_graphs_counts_as_long_as_the_driver_keeps_it(one: Limited) -> None:
    mib = 1 << 20
    half = (512 << 32) + 3
    said = one.said(
        f"graph={half}", "info", f"graph={half}", "info", f"graph={1024 << 32}", f"graph={1025 << 32}", "info",
        f"alloc={GIB}", f"graph={1 << 32}", "graph=3",
    )  # fmt: skip
    left = f"{512 * mib} of {GIB}"
    assert said == ["0", left, "0", left, "0", "2", f"{GIB} of {GIB}", "0", "2", "0"]
    assert one.held()[1] == GIB


@pytest.mark.slow
def test_a_module_counts_by_its_size_until_nvml_has_told(one: Limited) -> None:
    mib = 1 << 20
    rest = GIB - 4 * mib
    said = one.said(
        f"module={3 * mib}", "info", "unload=0", f"alloc={rest}", f"module={mib}", "free=1", f"module={mib}"
    )
    assert said == ["0", f"{rest} of {GIB}", "0", "0", "2", "0", "0"]


@pytest.mark.slow
def test_a_process_that_only_asks_takes_no_slot(one: Limited) -> None:
    assert one.said("info", "total=0", "copy=1") == [f"{GIB} of {GIB}", str(GIB), "0"]
    assert one.segment.counts().high == 0
    assert one.said("alloc=1", "info")[0] == "0"
    assert one.segment.counts().high == 1


@pytest.mark.slow
def test_ten_thousand_allocations_agree_with_a_sum(one: Limited) -> None:
    assert one.said(f"model=10000,{GIB}", "info") == ["0 wrong", f"{GIB} of {GIB}"]
    assert one.held()[1] <= GIB


@pytest.mark.slow
def test_who_races_for_the_last_byte_never_has_more_than_the_limit(one: Limited) -> None:
    words = (f"racing={GIB // 3}", "race=4,3000")  # three fit at once, of two processes with four threads each
    with one.running(*words, says=0) as first, one.running(*words, says=0) as second:
        assert (first.wait(), second.wait()) == (0, 0)
    assert one.held()[1] <= GIB
    assert one.held()[1] == GIB // 3 * 3, "they did race"
    assert one.said("info") == [f"{GIB} of {GIB}"]


@pytest.mark.slow
def test_those_that_fit_beside_each_other_deny_each_other_nothing(one: Limited) -> None:
    assert one.said(f"racing={GIB // 4}", "race=4,3000") == ["0 denied"]


@pytest.mark.slow
def test_what_a_killed_process_held_is_free_for_the_next_one(one: Limited) -> None:
    with one.running(f"alloc={GIB}", "stay", says=1) as process:
        assert one.said("alloc=1") == ["2"], "both count"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert one.said(f"alloc={GIB}") == ["0"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a process in /proc")
def test_a_process_that_proc_hides_is_not_taken_for_dead(one: Limited) -> None:
    """As with hidepid=2, where two users run processes of one attempt."""
    with one.running(f"alloc={GIB}", "stay", says=1) as process:
        hides = f'mount -t tmpfs none /proc/{process.pid} && exec "$@"'
        hidden = ["unshare", "-m", "sh", "-c", hides, "sh", str(one.built / "app"), "link", "info", "alloc=1"]
        assert one.outputs(hidden) == [f"0 of {GIB}", "2"]


@pytest.mark.slow
def test_the_worker_says_which_process_is_gone(one: Limited) -> None:
    """Of another PID namespace, where the library cannot tell: here that of a slot that is no process of ours."""
    with one.running(f"alloc={GIB}", "stay", says=1) as process:
        [slot] = one.segment.slots()
        assert (slot.pid, slot.used) == (process.pid, (GIB,))
        one.segment.mark_dead(slot)
        assert one.segment.slots() == []
        assert one.said("info", f"alloc={GIB}") == [f"{GIB} of {GIB}", "0"]


@pytest.mark.slow
def test_a_forked_child_counts_by_itself(one: Limited) -> None:
    said = one.said(
        f"alloc={GIB // 2}", "fork=1", f"alloc={GIB // 2 + 1}", f"alloc={GIB // 2}", "info", "free=1", "info"
    )
    assert said == ["0", "2", "0", f"0 of {GIB}", "0", f"{GIB // 2} of {GIB}"]
    with one.running("alloc=5", "fork=1", "alloc=6", "stay", says=2):
        slots = one.segment.slots()
        for slot in slots:
            kill_and_wait(slot.pid)
    assert [slot.used for slot in slots] == [(5,), (6,)]
    assert one.said(f"alloc={GIB}", "fork=0", "alloc=1", "free=0", "info") == ["0", "2", "0", f"{GIB} of {GIB}"]


@pytest.mark.slow
def test_a_process_that_becomes_another_program_begins_anew(one: Limited) -> None:
    app = str(one.built / "app")
    script = 'import os,sys; os.execv(sys.argv[1], [sys.argv[1], "link", "alloc=1073741824", "info"])'
    assert one.outputs([sys.executable, "-c", BY_CTYPES + script, app])[-2:] == ["0", f"0 of {GIB}"]


@pytest.mark.slow
def test_without_a_slot_memory_is_refused(one: Limited) -> None:
    for number in range(segment.SLOTS_MAX):  # processes of another namespace, of which nothing can be told
        at = segment._AT_SLOTS + number * segment._SLOT_BYTES
        one.segment._write(at, owner_of(number + 1, 99))
        one.segment._write(at + 8, 4)
    assert one.said("alloc=1") == ["2"]
    assert one.segment.counts().crowded == 1


@pytest.mark.slow
def test_a_program_that_the_worker_does_not_limit_is_left_alone(one: Limited, tmp_path: Path) -> None:
    nothing = {"MOORAGE_LIMITER": str(tmp_path / "nothing")}
    (tmp_path / "other").write_bytes(b"something else")
    for environment in (nothing, {"MOORAGE_LIMITER": ""}, {"MOORAGE_LIMITER": str(tmp_path / "other")}):
        for route in ROUTES:
            said = one.said(f"alloc={2 * GIB}", "info", "launch=1", "free=0", route=route, environment=environment)
            assert said == ["0", f"{TOTAL - 2 * GIB} of {TOTAL}", "1 launched", "0"]
    assert one.segment.counts().attached == 0


@pytest.mark.slow
def test_other_look_ups_find_what_they_found_before(one: Limited, tmp_path: Path) -> None:
    """RTLD_NEXT counts from the library that asks, and a function of the same name in another library is its own."""
    source = tmp_path / "wrap.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        #include <stdlib.h>
        int cuMemAlloc_v2(void *p, unsigned long n) { (void)p, (void)n; return 77; }
        void *malloc(size_t n) { /* the next one after this library, and not after the limiter */
            static void *(*next)(size_t);
            if (!next) next = dlsym(RTLD_NEXT, "malloc");
            return next(n);
        }
        int asked(void) {
            void *self = dlopen("WRAP", 1);
            int (*mine)(void *, unsigned long) = dlsym(self, "cuMemAlloc_v2");
            return mine(0, 0) == 77 && !dlsym(RTLD_DEFAULT, "cuNothing") && !dlsym(RTLD_DEFAULT, "cuMemGetInfo_v2");
        }
        """.replace("WRAP", str(tmp_path / "wrap.so"))
    )
    flags = ["-shared", "-fPIC", "-O1", "-o", str(tmp_path / "wrap.so"), str(source), "-ldl"]
    subprocess.run([shutil.which("cc") or "gcc", *flags], check=True)
    script = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).asked())"
    preload = {"LD_PRELOAD": f"{one.environment['LD_PRELOAD']}:{tmp_path / 'wrap.so'}", "LD_LIBRARY_PATH": ""}
    assert one.outputs([sys.executable, "-c", script, str(tmp_path / "wrap.so")], preload) == ["1"]


@pytest.mark.slow
def test_a_users_own_library_before_the_limiter_is_called_and_held(one: Limited, tmp_path: Path) -> None:
    source = tmp_path / "own.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        int cuMemAlloc_v2(void *p, unsigned long n) {
            int (*next)(void *, unsigned long) = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
            puts("own");
            return next(p, n);
        }
        """
    )
    subprocess.run(
        [shutil.which("cc") or "gcc", "-shared", "-fPIC", "-o", str(tmp_path / "own.so"), str(source)], check=True
    )
    preload = {"LD_PRELOAD": f"{tmp_path / 'own.so'}:{one.environment['LD_PRELOAD']}"}
    assert one.said(f"alloc={GIB + 1}", "alloc=1", environment=preload) == ["own", "2", "own", "0"]


@pytest.fixture
def control_node() -> Iterator[None]:
    """The file in /dev that NVIDIA's library makes for root, where it is missing, goes again."""
    node = Path("/dev/nvidiactl")
    is_there = node.exists()
    try:
        yield
    finally:
        if not is_there:
            node.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.downloads
@pytest.mark.usefixtures("control_node")
def test_all_that_nvidias_own_library_looks_up_is_held(one: Limited) -> None:
    folder, why = real_driver.folder()
    if why:
        pytest.skip(f"no libcuda of NVIDIA's: {why}")
    script = Path(limited_module.__file__).with_name("look_up.py")
    said = one.outputs([sys.executable, str(script)], {"LD_LIBRARY_PATH": folder})
    assert said[0] == "cuInit 100", "no device"
    assert said[-1] != "cuMemAlloc 0", "the driver's own error"
    found = [line.split() for line in said[1:-1]]
    assert len(found) > 150
    assert {name for _, name, library in found if library != "limiter"} == {"cuInit"}
    assert {library for _, name, library in found if name == "cuInit"} == {"libcuda"}
    assert one.segment.counts().missed == 0


# ------------------------------------------------------------------------------------------------------- launches


def throttle(one: Limited, tokens: float, capacity: float = 1e6) -> None:
    one.segment.beat()
    one.segment.set_rate(0, 1)
    one.segment.refill(0, tokens, capacity)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["link", "proc", "proc-ptsz"])
def test_fact_56_what_a_kernel_costs(one: Limited, route: str) -> None:
    throttle(one, 100)
    costs = []
    for threads in (1, 4096, 400_000, 2**31):
        before = one.segment.taken(0)
        assert one.said(f"launch=1,{threads}", route=route) == ["1 launched"]
        costs.append(round((one.segment.taken(0) - before) / TOKEN, 5))
    assert costs == [0.10002, 0.20086, 6.35799, 10.0]


@pytest.mark.slow
def test_every_way_to_launch_costs(one: Limited) -> None:
    throttle(one, 200)
    each, least = 0.20086, 0.10002
    for word, cost in (
        ("launchex=4096", each),
        ("cooperative=4096", each),
        ("graph=50", 50 * each),
        (f"graph={50 + (30 << 16)}", 80 * each + least),
        ("graph=50,20", 20 * each),
    ):
        before = one.segment.taken(0)
        assert one.said(word) == ["0"]
        assert (one.segment.taken(0) - before) / TOKEN == pytest.approx(cost, abs=0.0003), word


@pytest.mark.slow
def test_a_process_that_only_launches_has_a_slot_so_that_what_it_uses_counts(one: Limited) -> None:
    throttle(one, 5)
    with one.running("launch=1", "stay=1", says=1) as process:
        assert [slot.pid for slot in one.segment.slots()] == [process.pid]
        assert one.segment.used(0) == 0


@pytest.mark.slow
def test_fact_57_a_denied_launch_takes_nothing_and_waits_for_the_worker_alone(tmp_path: Path) -> None:
    for number in range(10):
        one = many(tmp_path / str(number), limited(GIB))
        throttle(one, 0.25)
        with one.running("launch=2,1", "launch=1,1", says=1) as process:
            taken = one.segment.taken(0)
            for _ in range(30):
                one.segment.beat()
                time.sleep(0.01)
            has_ended = process.poll() is not None
            one.segment.beat()
            taken_later = one.segment.taken(0)
            one.segment.refill(0, 1, 1)
            assert process.wait(60) == 0
        opened, in_the_end = one.segment.counts().opened, one.segment.taken(0)
        one.close()
        if not opened:  # else this machine stood still for two seconds, and it is tried again
            assert not has_ended, "time alone brings no tokens"
            assert (taken, taken_later, in_the_end) == (200048, 200048, 300072)
            return
        assert number < 9, "no launch ever waited"


def test_fact_57_tokens_rise_only_by_the_worker_up_to_the_capacity(tmp_path: Path) -> None:
    made = Segment.create(tmp_path / "segment", [Part(uuid_of(0))])
    assert [made.refill(0, tokens, 10) for tokens in (4, 4, 4, 0)] == [4, 8, 10, 10]
    again = Segment.adopt(made.path)
    assert again.refill(0, 1, 20) == 11, "what was given is known to the next worker"
    assert again.refill(0, 5, 2) == 11, "nothing that was given is taken back"
    made.close()
    again.close()


@pytest.mark.slow
def test_fact_59_without_a_heartbeat_launches_pass_and_memory_does_not(one: Limited) -> None:
    one.segment.set_rate(0, 1)
    now = time.monotonic_ns()
    for opened, beat in enumerate((0, now - 3 * 10**9, now + 3600 * 10**9), start=1):
        one.segment.beat(beat)
        assert one.said("launch=1", f"alloc={GIB + 1}") == ["1 launched", "2"]
        assert one.segment.counts().opened == opened
    one.segment.beat()
    with one.running("launch=1", says=0) as process:
        assert process.wait(60) == 0, "the worker has died meanwhile"
    assert one.segment.counts().opened == 4


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 100])
def test_as_many_launches_pass_as_there_are_tokens_for(one: Limited, at_once: int) -> None:
    cost, steps = 100_024 / TOKEN, 50
    throttle(one, 0)
    with one.running(f"launch={10**7},1", says=0):
        for _ in range(steps):
            one.segment.refill(0, at_once * cost + 1 / TOKEN, 1e6)  # rounded up
            while one.segment.refill(0, 0, 1e6) > cost / 2:
                one.segment.beat()
                time.sleep(0.001)
        assert one.segment.taken(0) / TOKEN / cost == pytest.approx(steps * at_once, abs=0.5)


@pytest.mark.slow
def test_devices_have_tokens_of_their_own(tmp_path: Path) -> None:
    job = many(tmp_path, limited(GIB, 0), limited(GIB, 1))
    job.segment.beat()
    job.segment.set_rate(1, 1)
    job.segment.refill(1, 5, 5)
    assert job.said("launch=1", "device=1", "launch=1")[0] == "1 launched"
    assert (job.segment.taken(0), job.segment.taken(1)) == (0, 100_024)


# ------------------------------------------------------------------------------------------------------ the segment


@pytest.mark.slow
def test_both_sides_have_one_layout(tmp_path: Path) -> None:
    names = {
        "sizeof(struct limiter_segment)": segment.SIZE,
        "offsetof(struct limiter_segment, heartbeat)": segment._AT_HEARTBEAT,
        "offsetof(struct limiter_segment, granted)": segment._AT_GRANTED,
        "offsetof(struct limiter_segment, rate)": segment._AT_RATE,
        "offsetof(struct limiter_segment, limit)": segment._AT_LIMIT,
        "offsetof(struct limiter_segment, context)": segment._AT_CONTEXT,
        "offsetof(struct limiter_segment, beyond)": segment._AT_BEYOND,
        "offsetof(struct limiter_segment, uuid)": segment._AT_UUID,
        "offsetof(struct limiter_segment, reading)": segment._AT_READING,
        "offsetof(struct limiter_segment, told)": segment._AT_TOLD,
        "sizeof(struct limiter_told)": segment._TOLD_BYTES,
        "sizeof(struct limiter_use)": segment._USE_WORDS * 8,
        "offsetof(struct limiter_segment, dead)": segment._AT_DEAD,
        "offsetof(struct limiter_segment, attached)": segment._AT_COUNTS,
        "offsetof(struct limiter_segment, bucket)": segment._AT_BUCKETS,
        "offsetof(struct limiter_segment, slots)": segment._AT_SLOTS,
        "offsetof(struct limiter_segment, frozen)": segment._AT_FROZEN,
        "offsetof(struct limiter_segment, waiting)": segment._AT_COUNTS + 8 * Counts._fields.index("waiting"),
        "sizeof(struct limiter_slot)": segment._SLOT_BYTES,
        "LIMITER_MAGIC": segment.MAGIC,
        "LIMITER_VERSION": segment.VERSION,
        "LIMITER_DEVICES": segment.DEVICES_MAX,
        "LIMITER_SLOTS": segment.SLOTS_MAX,
        "LIMITER_TOKEN": segment.TOKEN,
        "LIMITER_OWNER(4194303, 12345)": owner_of(4194303, 12345),
    }
    lines = "".join(f'printf("%llu\\n", (unsigned long long)({name}));' for name in names)
    source = tmp_path / "layout.c"
    source.write_text(f'#include <stdio.h>\n#include <stddef.h>\n#include "limiter.h"\nint main(void) {{ {lines} }}')
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc)")
    subprocess.run([compiler, "-I", str(LIMITER), "-o", str(tmp_path / "layout"), str(source)], check=True)
    said = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(names, map(int, said), strict=True)) == names


def test_a_segment_is_its_jobs_alone_and_bounded(tmp_path: Path) -> None:
    made = Segment.create(tmp_path / "segment", [Part(uuid_of(0), 5, 6, 1)])
    assert (made.path.stat().st_mode & 0o777, made.path.stat().st_size) == (0o600, SIZE)
    assert (made.limit(0), made.slots(), made.counts().attached) == (5, [], 0)
    with pytest.raises(FileExistsError):
        Segment.create(tmp_path / "segment", [])
    with pytest.raises(ValueError, match="at most 16 GPUs, found 17"):
        Segment.create(tmp_path / "other", [Part(uuid_of(0))] * 17)
    made.close()


def test_what_a_job_writes_into_its_segment_harms_no_worker(tmp_path: Path) -> None:
    made = Segment.create(tmp_path / "segment", [Part(uuid_of(0), 5)])
    made.path.write_bytes(b"\xff" * SIZE)
    made.beat()
    assert made.refill(0, 1, 1) <= 1
    assert len(made.slots()) <= segment.SLOTS_MAX
    assert made.used(0) >= 0
    for slot in made.slots():
        made.mark_dead(slot)
    with pytest.raises(SegmentError, match="is not a segment of this release"):
        Segment.adopt(made.path)
    made._write(0, segment.MAGIC)
    made._write(8, segment.VERSION)
    made._write(16, SIZE)
    made._write(24, 1)
    made._write(segment._AT_GRANTED, 2**64 - 1)
    again = Segment.adopt(made.path)
    again.refill(0, again.rate(0), 1e6)
    again.close()
    os.truncate(made.path, 0)  # a mapping of it would end this process
    assert (made.slots(), made.used(0), made.limit(0)) == ([], 0, 0)
    made.beat()
    made.refill(0, 1, 1)
    with pytest.raises(SegmentError, match="is cut short"):
        Segment.adopt(made.path)
    made.close()


@pytest.mark.slow
def test_what_nvml_tells_in_a_job_is_its_part(tmp_path: Path) -> None:
    board = Board(uuid_of(0), total_mib=81559, used_mib=30000)
    stub = Stub(tmp_path / "stub", board)
    job = many(tmp_path / "job", limited(4 << 30))
    with job.running(f"alloc={1 << 30}", "stay", says=1):
        script = (
            "import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
            "for v in (None, pynvml.nvmlMemory_v2):\n"
            "    m = pynvml.nvmlDeviceGetMemoryInfo(h, v); print(m.total >> 20, m.free >> 20, m.used >> 20)"
        )
        said = job.outputs([sys.executable, "-W", "ignore", "-c", script], stub.environment)
        assert said == ["4096 3072 1024"] * 2


@pytest.mark.slow
def test_it_loads_where_glibc_is_as_old_as_2_17() -> None:
    dump = shutil.which("objdump")
    if dump is None:
        pytest.skip("no objdump to read the library's needs")
    library = limited_module.built() / "limiter.bin"
    said = subprocess.run([dump, "-T", str(library)], capture_output=True, text=True, check=True).stdout
    needs = {word.strip("()") for line in said.splitlines() for word in line.split() if "GLIBC_" in word}
    assert needs
    assert max(tuple(map(int, need.removeprefix("GLIBC_").split("."))) for need in needs) <= (2, 17)


MIB = 1 << 20


@pytest.mark.parametrize("route", ["link", "proc"])
def test_free_memory_is_without_the_context_before_the_first_allocation_too(tmp_path: Path, route: str) -> None:
    one = Limited(tmp_path, limited(GIB, context_bytes=256 * MIB))
    try:
        free = GIB - 256 * MIB
        words = ("info", f"alloc={free + 1}", f"alloc={free}", "info", "alloc=1")
        assert one.said(*words, route=route) == [f"{free} of {GIB}", "2", "0", f"0 of {GIB}", "2"]
        assert one.said("alloc=1", "free=0", "info") == ["0", "0", f"{free} of {GIB}"], "as after an allocation"
    finally:
        one.close()


def test_nothing_is_free_where_the_context_does_not_fit(tmp_path: Path) -> None:
    one = Limited(tmp_path, limited(100 * MIB, context_bytes=256 * MIB))
    try:
        assert one.said("info", "alloc=1", "info") == [f"0 of {100 * MIB}", "2", f"0 of {100 * MIB}"]
    finally:
        one.close()
