"""What a job's processes get when it is asked to end: SIGTERM once, and the whole grace, whatever ends before them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Final

import pytest

from moorage.system.cgroup import cgroup_of
from moorage.system.proctree import boottime_s, read_process
from moorage.worker.supervisor.protocol import EndAttempt, Unproven
from tests.first_thread_gone import IN_SHELL
from tests.system.worker.supervisor_rig import Rig, arguments_of, lives, poll, rigged, sh, with_rig
from tests.turns import turns

PTRACE_SEIZE: Final = 0x4206

#: on SIGTERM it says `saving`, waits until the file in argv[1] is there, and says `saved`
SAVER: Final = """
import os, signal, sys, time
def say(line):
    os.write(1, line.encode())  # print() is not reentrant: the signal may come while it writes the first line
def save(*_):
    say("saving\\n")
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    say("saved\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, save)
say(f"ready {os.getpid()}\\n")
while True:
    time.sleep(0.1)
"""

#: `saver` is the command that saves; each starts it in a way in which its main process ends before it
BEHIND: Final = {
    "a shell": "{saver}; echo after",
    "two shells": "sh -c '{saver}; echo after'; echo after",
    "a bash that cleans up": "exec bash -c 'trap \"echo cleaned\" EXIT; {saver}; echo after'",
    "timeout": "timeout 1h {saver}; echo after",
    "a session of its own": "setsid -w {saver}; echo after",
    "a session of its own, in the background": "setsid {saver} & wait; echo after",
    "job control": "exec bash -m -c '{saver}; echo after'",
    "a bash that cleans up, and timeout": "exec bash -c 'trap \"echo cleaned\" EXIT; timeout 1h {saver}; echo after'",
}
#: and with its output in a pipe
PIPED: Final = {
    "a pipe": "{saver} | tee log",
    "three in a row": "{saver} | grep --line-buffered . | tee log",
    "a substitution": "exec bash -c '{saver} > >(tee log); echo after'",
    "a shell that handles it": "trap 'exit 3' TERM; {saver} | tee log",
}


@pytest.fixture(params=turns(("cgroup", "walk", "forked"), often=1))
def arguments(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return arguments_of(request.param)


def saver_of(folder: Path) -> str:
    script = folder / "saver.py"
    script.write_text(SAVER)
    return f"{sys.executable} {script} {folder / 'go'}"


async def ready(rig: Rig) -> int:
    """Wait until the saver handles SIGTERM; return its pid."""
    return int((await rig.line("j"))[0].split()[1])


@pytest.mark.parametrize("script", [*BEHIND.values(), *PIPED.values()], ids=[*BEHIND, *PIPED])
@rigged
async def test_a_program_behind_others_gets_one_signal_and_the_whole_grace(
    rig: Rig, tmp_path: Path, script: str
) -> None:
    await rig.client.start([sh("j", script.format(saver=saver_of(tmp_path)), cwd=str(tmp_path))])
    pid = await ready(rig)
    await rig.client.end([EndAttempt(key="j", grace_s=600.0)])
    await rig.line("j", 2)
    assert lives(pid)
    (tmp_path / "go").touch()
    assert (await rig.ended("j")).reason == "end"
    said = [line for line in rig.text("j").splitlines() if line != "cleaned"]
    if "timeout" in script:  # it signals its child, and then its whole group
        said = list(dict.fromkeys(said))
    assert said == [f"ready {pid}", "saving", "saved"]
    if "tee log" in script:
        assert (tmp_path / "log").read_text() == rig.text("j")


@rigged
async def test_the_grace_lasts_when_the_main_process_is_over(rig: Rig, tmp_path: Path) -> None:
    await rig.client.start([sh("j", f"{saver_of(tmp_path)}; echo after")])
    main = (await rig.started("j")).pid
    pid = await ready(rig)
    await rig.client.end([EndAttempt(key="j", grace_s=600.0)])
    await poll(lambda: read_process(main) is None)  # reaped
    assert lives(pid)
    assert not rig.ends()
    (tmp_path / "go").touch()
    ended = await rig.ended("j")
    assert (ended.reason, ended.signal) == ("end", signal.SIGTERM)
    assert rig.text("j").endswith("saving\nsaved\n")


@pytest.mark.parametrize("by", ["timeout", "fence"])
@rigged
async def test_a_time_limit_and_a_fence_leave_it_its_grace(rig: Rig, tmp_path: Path, by: str) -> None:
    limit_s = 2.0 if by == "timeout" else None
    await rig.client.start([sh("j", f"{saver_of(tmp_path)}; echo after", timeout_s=limit_s, grace_s=600.0)])
    await ready(rig)
    if by == "fence":
        await rig.client.fence(boottime_s(), 600.0)
    await rig.line("j", 2)
    (tmp_path / "go").touch()
    assert (await rig.ended("j")).reason == by
    assert rig.text("j").endswith("saving\nsaved\n")


@rigged
async def test_what_is_left_is_killed_when_the_grace_is_over(rig: Rig, tmp_path: Path) -> None:
    await rig.client.start([sh("j", f"{saver_of(tmp_path)}; echo after")])
    main = (await rig.started("j")).pid
    pid = await ready(rig)
    await rig.client.end([EndAttempt(key="j", grace_s=1.0)])
    await poll(lambda: read_process(main) is None)
    ended = await rig.ended("j")
    assert (ended.reason, ended.signal, lives(pid)) == ("end", signal.SIGTERM, False)


#: nothing in them saves: the job is over as soon as all have got the signal, and none is begun behind the word `up`
QUICK: Final = {
    "a child that does not handle it": ("trap 'echo bye; exit 7' TERM; sh -c 'echo up; exec sleep 1000'; :", 7),
    "a child behind a pipe that does not": ("trap 'exit 7' TERM; yes | sh -c 'read x; echo up; exec sleep 1000'", 7),
    "another session that does not handle it": ("setsid sh -c 'echo up; exec sleep 1000' & wait", None),
    "a stopped one": ("setsid sleep 1000 & kill -STOP $!; echo up; wait", None),
    "one without its first thread": (f"exec {IN_SHELL}", None),
    "a child without its first thread": (f"{IN_SHELL}; :", None),
}


@pytest.mark.parametrize(("script", "exit_code"), QUICK.values(), ids=QUICK.keys())
@rigged
async def test_a_job_that_saves_nothing_ends_at_once(rig: Rig, script: str, exit_code: int | None) -> None:
    await rig.client.start([sh("j", script)])
    await rig.line("j")
    await rig.client.end([EndAttempt(key="j", grace_s=600.0)])
    ended = await rig.ended("j")
    assert (ended.reason, ended.exit_code) == ("end", exit_code)


@rigged
async def test_attempts_end_also_when_no_descriptor_is_left(rig: Rig) -> None:
    await rig.client.start([sh("j", "sh -c 'echo up; exec sleep 1000'; echo after")])
    await rig.line("j")
    pid = rig.client.identity.pid
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    first_free = min(set(range(max(used) + 2)) - used)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, before[1]))
    await rig.client.end([EndAttempt(key="j", grace_s=600.0)])
    assert (await rig.ended("j")).reason == "end"
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("how", ["", "setsid ", "env -i /usr/bin/setsid "], ids=["plain", "session", "scrubbed"])
def test_a_process_that_left_its_cgroup_is_gone_before_the_end_is_told(tmp_path: Path, how: str) -> None:
    arguments = arguments_of("cgroup")
    above = cgroup_of()
    assert above is not None
    move = f"echo 0 >{above}/cgroup.procs; echo $$; echo moved >fifo; exec /bin/sleep 1000"

    async def scenario(rig: Rig) -> None:
        ended = await rig.run(
            sh("j", f"mkfifo fifo; {how}/bin/sh -c '{move}' & read word <fifo; exit 5", cwd=str(tmp_path))
        )
        assert (ended.reason, ended.exit_code, ended.proof) == ("exit", 5, "cgroup")
        assert not lives(int(rig.text("j")))

    with_rig(tmp_path, arguments, scenario)


@pytest.mark.slow
def test_what_an_operator_counts_as_over_is_listed_no_more_and_its_end_says_nothing_new(tmp_path: Path) -> None:
    """A traced process cannot be reaped before its tracer looks, so it is in doubt as one that hangs in the kernel."""

    async def scenario(rig: Rig) -> None:
        await rig.client.start([sh("j", "exec sleep 1000"), sh("other", "exec sleep 1000")])
        pid = (await rig.started("j")).pid
        await rig.started("other")
        assert ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_SEIZE, pid, None, None) == 0, os.strerror(
            ctypes.get_errno()
        )
        await rig.client.end([EndAttempt(key="j", grace_s=0.0)])
        await rig.until(lambda: any(isinstance(event, Unproven) for event in rig.events))
        assert [each.key for each in (await rig.client.list()).unproven] == ["j"]
        await rig.client.forget(["j", "other"])
        assert (await rig.client.list()).living == ["other"]  # of which nothing is in doubt
        await asyncio.to_thread(os.waitpid, pid, 0)
        assert (await rig.ended("j")).signal == signal.SIGKILL
        assert (await rig.client.list()).ended == ()

    with_rig(tmp_path, (), scenario)
