"""The supervisor with real processes, each test in both ways of proof: by cgroup and by walking the tree."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import moorage
from moorage.system.framing import framed
from moorage.system.proctree import STATE_MARK, boottime_s, children, read_process
from moorage.worker.supervisor.capped_output import output_path
from moorage.worker.supervisor.client import Supervised, SupervisorGone, SupervisorRefused, SupervisorUnavailable
from moorage.worker.supervisor.journal import read_journal
from moorage.worker.supervisor.launcher_client import open_compiled
from moorage.worker.supervisor.protocol import (
    JOURNAL_NAME,
    SOCKET_NAME,
    EndAttempt,
    Ended,
    Output,
    StartAttempt,
)
from moorage.worker.supervisor.state_folder import EXIT_HELD, state_mark
from tests.disk import fill, mount_small, unmount
from tests.first_thread_gone import IN_SHELL
from tests.system.worker.supervisor_rig import (
    SHELL_PATH,
    WAIT_S,
    Rig,
    arguments_of,
    lives,
    poll,
    rig_at,
    rigged,
    run,
    sh,
    with_rig,
)
from tests.turns import turns

ROOTS: Final = os.pathsep.join(str(Path(path).parent) for path in moorage.__path__)
needs_compiled = pytest.mark.skipif(bool(open_compiled()[1]), reason="the launcher is not compiled")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


#: `walk` has the launcher of the first and the proof of the last
PROOFS: Final = ("cgroup", "walk", "forked")


@pytest.fixture(params=turns(PROOFS, often=1))
def arguments(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return arguments_of(request.param)


@contextlib.contextmanager
def agent(state: Path, arguments: tuple[str, ...], body: str) -> Iterator[subprocess.Popen[str]]:
    """A separate process that connects as `s`, runs `body`, says `ready` and waits for ever."""
    script = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from moorage.worker.supervisor.client import Supervised\n"
        "from moorage.worker.supervisor.protocol import *\n"
        "from moorage.system.proctree import boottime_s\n"
        "async def main():\n"
        f"    s = await Supervised.connect(Path({str(state)!r}), arguments={arguments!r})\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
        + "    print('ready', flush=True)\n    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], env={"PYTHONPATH": ROOTS}, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# -- what a child finds


@rigged
async def test_a_child_gets_exactly_the_environment_given(rig: Rig, arguments: tuple[str, ...]) -> None:
    env = {"A": "1", "EMPTY": "", "ODD": "ä\n=x", "MOORAGE_JOB": "j", "MOORAGE_FENCE": str(os.getpid())}
    ended = await rig.run(StartAttempt(key="t/j/0/1/7", argv=("/usr/bin/env", "-0"), env=env))
    assert (ended.reason, ended.exit_code, ended.signal) == ("exit", 0, None)
    assert ended.proof == ("walk" if arguments else "cgroup")
    found = rig.text("t/j/0/1/7").split("\0")
    given = [f"{name}={value}" for name, value in env.items()]
    assert sorted(found) == sorted(["", f"{STATE_MARK}={state_mark(rig.state)}", *given])


@rigged
async def test_its_end_says_the_cpu_time_and_the_memory_of_its_processes(rig: Rig, arguments: tuple[str, ...]) -> None:
    held, spins = "x = bytearray(300 << 20)", "while time.process_time() < 0.3: pass"
    script = f"{sys.executable} -c '{held}'; {sys.executable} -c 'import time\n{spins}'; exit 3"
    ended = await rig.run(sh("j", script))
    assert ended.exit_code == 3
    assert ended.cpu_ms is not None
    assert ended.cpu_ms >= 300
    assert 300 << 20 <= ended.largest_bytes < 1 << 30
    little = await rig.run(sh("k", "exit 0"))
    assert little.largest_bytes == 0, "what it had before its exec is not its own"


@rigged
async def test_a_child_starts_with_clean_process_attributes(rig: Rig) -> None:
    script = "umask; pwd; ulimit -n; echo $(ls /proc/self/fd); grep -E '^Sig(Blk|Ign)' /proc/self/status; cat"
    await rig.run(sh("j", script, cwd="/usr"))
    umask, cwd, limit, descriptors, blocked, ignored = rig.text("j").splitlines()
    assert (umask, cwd) == ("0022", "/usr")
    assert int(limit) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # Input, output, error, and the folder that `ls` reads.
    assert descriptors.split() == ["0", "1", "2", "3"]
    # The C library keeps signals 32 and 33 to itself: what was inherited for those stays.
    assert [int(line.split()[1], 16) & ~(3 << 31) for line in (blocked, ignored)] == [0, 0]
    process = await rig.run(sh("s", "echo $$; cut -d' ' -f5,6 /proc/$$/stat"))
    pid, group_and_session = rig.text("s").splitlines()
    assert group_and_session == f"{pid} {pid}"
    assert process.pid == int(pid)


@rigged
async def test_the_kernel_ends_a_job_before_its_supervisor(rig: Rig) -> None:
    await rig.run(sh("j", "cat /proc/self/oom_score_adj"))
    of_supervisor = Path(f"/proc/{rig.client.identity.pid}/oom_score_adj").read_text()
    assert int(of_supervisor) < int(rig.text("j")) == 500


@needs_root
@rigged
async def test_a_child_of_another_user_cannot_signal_the_supervisor(rig: Rig) -> None:
    ended = await rig.run(sh("j", "id -u; id -g; id -G; kill -KILL $PPID || echo no", user="nobody"))
    assert ended.exit_code == 0
    uid, gid, _, answer = rig.text("j").splitlines()
    assert (int(uid), answer) == (65534, "no")
    assert int(gid) != 0
    await rig.run(sh("n", "id -u; id -g; id -G", user=54321))
    assert rig.text("n").split() == ["54321"] * 3
    await rig.client.list()


@rigged
async def test_limits_are_set_and_what_cannot_be_is_told(rig: Rig) -> None:
    attempt = sh("j", "true", memory_bytes=1 << 30, cpu_milli=500)
    await rig.run(attempt)
    controllers = {"memory_bytes": "memory", "cpu_milli": "cpu"}
    missing = {name for name, controller in controllers.items() if controller not in rig.client.controllers}
    assert set(rig.starts()["j"].ignored) == missing


FAILING_STARTS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"argv": ("/no/such/program",)}, "exec", "ENOENT"),
    ({"argv": ("no-such-program",)}, "exec", "ENOENT"),
    ({"argv": ("/proc/version",)}, "exec", "EACCES"),
    ({"argv": ("/etc",)}, "exec", "EACCES"),
    ({"cwd": "/no/such/folder"}, "cwd", "ENOENT"),
    ({"cwd": "/etc/hostname"}, "cwd", "ENOTDIR"),
    ({"user": "no-such-user"}, "user", "EINVAL"),
    ({"argv": ()}, "exec", "EINVAL"),
    ({"argv": ("/bin/echo", "a\0b")}, "request", "EINVAL"),
    ({"env": {"A=B": "c"}}, "request", "EINVAL"),
    ({"timeout_s": -1.0}, "request", "EINVAL"),
    ({"checkpoint_signal": "SIGKILL", "checkpoint_before_s": 1.0, "timeout_s": 2.0}, "request", "EINVAL"),
    ({"checkpoint_signal": "SIGUSR1"}, "request", "EINVAL"),
    ({"checkpoint_signal": "SIGNOT", "checkpoint_before_s": 1.0, "timeout_s": 2.0}, "request", "EINVAL"),
]


@rigged
async def test_a_start_that_fails_is_a_typed_end(rig: Rig) -> None:
    for number, (fields, stage, code) in enumerate(FAILING_STARTS):
        ended = await rig.run(StartAttempt(**({"key": f"j{number}", "argv": ("/bin/true",), "env": {}} | fields)))
        found = (ended.reason, ended.stage, os.strerror(ended.errno or 0), ended.exit_code, ended.signal)
        assert found == ("start-failed", stage, os.strerror(getattr(errno, code)), None, None), fields
        assert ended.message
        assert (await rig.client.list()).running == ()
    assert not rig.starts()


WINDOWS: Final = " (without CR LF)"
LOOKED_FOR: Final[list[tuple[dict[str, Any], str]]] = [
    ({"argv": ("nosuchprogram",)}, "no program nosuchprogram in PATH /usr/local/bin:/usr/bin:/bin"),
    ({"argv": ("nosuchprogram",), "env": {"PATH": "/bin"}}, "no program nosuchprogram in PATH /bin"),
    (
        {"argv": ("python", "train.py"), "env": {"PATH": "/nowhere"}},
        "no program python: name python3, or an environment's python by its path; it is not in PATH /nowhere",
    ),
    (
        {"argv": ("python",), "env": {"PATH": "/bin:" * 12 + "/here"}},
        "no program python: name python3, or an environment's python by its path; it is not in PATH …"
        f"{('/bin:' * 12)[-34:]}/here",
    ),
    (
        {"argv": ("echo hi",), "env": {"PATH": "/bin"}},
        "no program 'echo hi' in PATH /bin; it is one word: leave the quotes out, or use sh -c",
    ),
    (
        {"argv": ("./train.sh",)},
        "no ./train.sh in / (--with brings files there, --cwd names another folder), or not what its first line names"
        f"{WINDOWS}",
    ),
    (
        {"argv": ("./a", "b c"), "cwd": "/usr"},
        "no ./a in /usr (--with brings files there, --cwd names another folder), or not what its first line names"
        f"{WINDOWS}",
    ),
    ({"argv": ("/no/such",)}, f"no /no/such on the worker, or not what its first line names{WINDOWS}"),
    ({"argv": ("/usr",)}, "/usr: Permission denied"),
    ({"cwd": "/no/such/folder"}, "no folder /no/such/folder"),
    ({"cwd": "/etc/hostname"}, "no folder /etc/hostname"),
    ({"argv": ("a\n\x1b[2J" + "b" * 99,), "env": {"PATH": ""}}, f"no program …{'b' * 59} in PATH ''"),
]


@rigged
async def test_a_start_that_fails_says_what_it_looked_for_and_where(rig: Rig, tmp_path: Path) -> None:
    for number, (fields, words) in enumerate(LOOKED_FOR):
        ended = await rig.run(StartAttempt(**({"key": f"j{number}", "argv": ("/bin/true",), "env": {}} | fields)))
        assert ended.message == words
    bare = tmp_path / "bare.sh"
    bare.write_text("echo hi\n")
    bare.chmod(0o755)
    ended = await rig.run(StartAttempt(key="bare", argv=(str(bare),), env={}))
    assert "bare.sh has no first line as #!/bin/sh, or is for another processor" in ended.message


@rigged
async def test_the_worker_s_own_moorage_is_found_where_the_path_of_a_job_has_none(rig: Rig, tmp_path: Path) -> None:
    """A service's member is `moorage serve`: its command named the path that moorage has on the submitting machine."""
    ended = await rig.run(StartAttempt(key="own", argv=("moorage", "--version"), env={"PATH": "/nowhere"}))
    assert (ended.message, ended.exit_code) == ("", 0)
    named = tmp_path / "moorage"
    named.write_text("#!/bin/sh\nexit 7\n")
    named.chmod(0o755)
    ended = await rig.run(StartAttempt(key="named", argv=("moorage",), env={"PATH": str(tmp_path)}))
    assert ended.exit_code == 7


@rigged
async def test_a_failed_start_does_not_hurt_its_batch(rig: Rig) -> None:
    attempts = [sh(f"j{number}", f"exit {number}", cwd="/nowhere" if number % 3 == 0 else None) for number in range(40)]
    await rig.client.start(attempts)
    await rig.until(lambda: len(rig.ends()) == len(attempts))
    for number, attempt in enumerate(attempts):
        ended = rig.ends()[attempt.key]
        assert (ended.reason == "start-failed") == (number % 3 == 0)
        assert ended.exit_code == (None if number % 3 == 0 else number)


@rigged
async def test_what_is_needed_to_end_a_job_is_known_before_its_first_instruction(
    rig: Rig, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """The journal has its record, with its cgroup and marks; and both its kinds of marks are in its environment."""
    journal = rig.state / JOURNAL_NAME
    ended = await rig.run(sh("j", f"cat {journal} >&2; cat /proc/self/cgroup; echo $$; env"))
    copy = tmp_path / "journal"
    copy.write_bytes(output_path(rig.state, "j", "stderr").read_bytes())
    starting = read_journal(copy)["j"].starting
    assert starting is not None
    said = rig.text("j").splitlines()
    assert starting.boottime_s <= boottime_s()
    assert bool(starting.cgroup) == (not arguments)
    assert not starting.cgroup or any(line.endswith(f"/{Path(starting.cgroup).name}") for line in said)
    assert len(starting.marks) == 4
    assert {os.fsdecode(mark) for mark in starting.marks} <= set(said)
    assert str(ended.pid) in said
    assert read_journal(journal)["j"].pid == ended.pid


def test_no_two_supervisors_name_a_group_alike(tmp_path: Path) -> None:
    """The next one kills what stands under the names of the former one's attempts: none of its own may be there."""

    async def scenario(rig: Rig) -> None:
        await rig.client.start([sh("a", "exec sleep 1000")])
        await rig.started("a")
        os.kill(rig.client.identity.pid, signal.SIGKILL)
        await rig.client.wait_gone()
        await rig.connect()
        await rig.client.start([sh("b", "exec sleep 1000")])
        await rig.started("b")
        left = read_journal(rig.state / JOURNAL_NAME)
        names = [entry.starting.cgroup for entry in left.values() if entry.starting is not None]
        assert len(set(names)) == len(names) >= 1

    with_rig(tmp_path, arguments_of("cgroup"), scenario)


def test_a_start_that_cannot_be_written_down_leaves_nothing_and_the_next_one_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig_at(tmp_path / "disk" / "state", *arguments_of("cgroup")) as rig:
            assert rig.client.cgroup is not None
            filler = fill(tmp_path / "disk")
            long = {"PATH": SHELL_PATH, "MOORAGE_TENANT": "t" * 8000, "MOORAGE_JOB": "a", "MOORAGE_FENCE": "1"}
            refused = await rig.run(sh("a", "true", env=long))
            filler.unlink()
            assert (refused.stage, refused.errno, refused.proof) == ("journal", errno.ENOSPC, "never-ran")
            assert [entry for entry in Path(rig.client.cgroup).iterdir() if entry.is_dir()] == []
            assert (await rig.run(sh("b", "echo ran"))).exit_code == 0
            assert rig.text("b") == "ran\n"

    if not mount_small(tmp_path / "disk", 4):
        pytest.skip("needs the right to mount")
    try:
        run(scenario())
    finally:
        unmount(tmp_path / "disk")


# -- ending


@rigged
async def test_ends_tell_how_the_main_process_ended(rig: Rig) -> None:
    assert (await rig.run(sh("code", "exit 3"))).exit_code == 3
    assert (await rig.run(sh("signal", "kill -SEGV $$"))).signal == signal.SIGSEGV
    assert (await rig.run(sh("high", "exit 255"))).exit_code == 255


GONE: Final = f"{IN_SHELL} >fifo & read pid <fifo; echo $pid"
LEAVES: Final = {
    "a new session": "setsid sleep 1000 & echo $!",
    "two sessions down": "setsid sh -c 'setsid sleep 1000 & echo $!'",
    "a scrubbed environment": "env -i /usr/bin/setsid /bin/sleep 1000 & echo $!",
    "a stopped one": "setsid sleep 1000 & echo $!; kill -STOP $!",
    "one without its first thread": f"mkfifo fifo; setsid {GONE}",
    "one without its first thread, scrubbed": f"mkfifo fifo; env -i /usr/bin/setsid {GONE}",
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES.keys())
@rigged
async def test_what_the_main_process_leaves_is_killed_before_the_end_is_told(
    rig: Rig, tmp_path: Path, leave: str
) -> None:
    await rig.client.start([sh("other", "exec sleep 1000")])
    other = await rig.started("other")
    ended = await rig.run(sh("j", f"{leave}; exit 5", cwd=str(tmp_path)))
    assert (ended.reason, ended.exit_code) == ("exit", 5)
    assert not lives(int(rig.text("j")))
    assert lives(other.pid)


@rigged
async def test_timeout_asks_first_then_kills(rig: Rig) -> None:
    await rig.client.start(
        [
            sh("deaf", "trap '' TERM; while :; do sleep 1000; done", timeout_s=1.0, grace_s=0.2),
            sh("polite", "trap 'exit 7' TERM; while :; do sleep 1000; done", timeout_s=1.0, grace_s=60.0),
            sh("quick", "exit 0", timeout_s=60.0),
        ]
    )
    await rig.until(lambda: len(rig.ends()) == 3)
    deaf, polite, quick = (rig.ends()[key] for key in ("deaf", "polite", "quick"))
    assert (deaf.reason, deaf.signal) == ("timeout", signal.SIGKILL)
    assert (polite.reason, polite.exit_code) == ("timeout", 7)
    assert (quick.reason, quick.exit_code) == ("exit", 0)


@rigged
async def test_a_stopped_process_takes_its_end(rig: Rig) -> None:
    await rig.client.start([sh("j", "trap 'exit 9' TERM; echo up; kill -STOP $$")])
    pid = (await rig.started("j")).pid
    await poll(lambda: (process := read_process(pid)) is not None and process.state == "T")
    await rig.client.end([EndAttempt(key="j", grace_s=60.0)])
    assert (await rig.ended("j")).exit_code == 9


@rigged
async def test_a_second_end_can_only_shorten_the_grace(rig: Rig) -> None:
    await rig.client.start([sh("j", "trap '' TERM; echo up; while :; do sleep 1000; done")])
    await rig.line("j")
    await rig.client.end([EndAttempt(key="j", grace_s=600.0, why="first")])
    await rig.client.end([EndAttempt(key="j", grace_s=0.0, why="second")])
    ended = await rig.ended("j")
    assert (ended.signal, ended.why) == (signal.SIGKILL, "first")


@rigged
async def test_an_end_sent_right_behind_the_start_counts(rig: Rig) -> None:
    attempts = [sh(f"j{number}", "exec sleep 1000") for number in range(40)]
    orders = [EndAttempt(key=attempt.key, grace_s=5.0) for attempt in attempts]
    await asyncio.gather(rig.client.start(attempts), rig.client.end(orders))
    await rig.until(lambda: len(rig.ends()) == len(attempts))
    assert {ended.reason for ended in rig.ends().values()} == {"end"}
    assert children(rig.client.identity.pid) == launchers(rig)


# -- output


@rigged
async def test_output_past_its_cap_is_dropped_and_said_once(rig: Rig) -> None:
    total, cap = 20_000_000, 1_000_000
    script = f"head -c {total} /dev/zero; echo problem >&2"
    ended = await rig.run(sh("j", script, output_cap_bytes=cap))
    assert ended.exit_code == 0
    assert (ended.stdout_bytes, ended.dropped_bytes) == (total, total - cap)
    data = output_path(rig.state, "j", "stdout").read_bytes()
    assert data[:cap] == bytes(cap)
    assert data[cap:].count(b"dropped") == 1
    assert len(data) < cap + 200
    assert output_path(rig.state, "j", "stderr").read_text() == "problem\n"


@rigged
async def test_output_is_streamed_in_order(rig: Rig) -> None:
    await rig.run(sh("j", "seq 1 20000; echo oops >&2", stream_output=True))
    pieces = [event for event in rig.events if isinstance(event, Output)]
    together = b""
    for piece in pieces:
        if piece.stream == "stdout":
            assert piece.offset == len(together)
            together += piece.data
    assert together.decode() == rig.text("j") == "".join(f"{number}\n" for number in range(1, 20001))
    assert [piece.data for piece in pieces if piece.stream == "stderr"] == [b"oops\n"]
    assert isinstance(rig.events[-1], Ended)


@rigged
async def test_an_agent_that_does_not_read_holds_no_job_back(rig: Rig, arguments: tuple[str, ...]) -> None:
    body = (
        "await s.start([StartAttempt(key='j', argv=('/usr/bin/head', '-c', '50000000', '/dev/zero'), env={},"
        " stream_output=True)])\nprint('ready', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"
    )
    with agent(rig.state, arguments, body) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        ended = await rig.ended("j")
        assert (ended.exit_code, ended.stdout_bytes) == (0, 50_000_000)
        await rig.client.list()


# -- agents come and go


@rigged
async def test_a_new_agent_finds_what_runs_and_what_ended(rig: Rig, arguments: tuple[str, ...]) -> None:
    identity = rig.client.identity
    rig.client.close()
    body = (
        "await s.start([StartAttempt(key='long', argv=('/bin/sleep', '1000'), env={}),"
        " StartAttempt(key='short', argv=('/bin/false',), env={})])\n"
        # The short one may end before the other has been seen to run.
        "seen = set()\n"
        "while not seen >= {(Started, 'long'), (Ended, 'short')}:"
        " seen |= {(type(e), e.key) for e in await s.next_events()}"
    )
    with agent(rig.state, arguments, body) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        process.kill()
        process.wait()
    await rig.connect(spawn_if_absent=False)
    assert rig.client.identity == identity
    listed = await rig.client.list()
    assert [started.key for started in listed.running] == ["long"]
    assert [(ended.key, ended.exit_code) for ended in listed.ended] == [("short", 1)]
    assert lives(listed.running[0].pid)
    # Starting it again starts nothing and tells the same.
    await rig.client.start([StartAttempt(key="long", argv=("/bin/false",), env={})])
    assert (await rig.started("long")).pid == listed.running[0].pid


@rigged
async def test_forget_drops_ends_and_keeps_output(rig: Rig) -> None:
    await rig.client.start([sh("a", "echo a"), sh("b", "echo b"), sh("c", "exec sleep 1000")])
    await rig.ended("a")
    await rig.ended("b")
    await rig.started("c")
    await rig.client.forget(["a", "b", "c", "unknown"])
    listed = await rig.client.list()
    assert listed.ended == ()
    assert [started.key for started in listed.running] == ["c"]
    assert rig.text("b") == "b\n"


@rigged
async def test_two_hundred_in_one_batch_leave_no_descriptor_behind(rig: Rig) -> None:
    pid = rig.client.identity.pid
    await rig.client.list()
    before = len(os.listdir(f"/proc/{pid}/fd"))
    attempts = [sh(f"j{number}", f"echo {number}; exit {number % 7}") for number in range(200)]
    await rig.client.start(attempts)
    await rig.until(lambda: len(rig.ends()) == 200)
    assert len(rig.starts()) == 200
    for number in range(200):
        assert rig.ends()[f"j{number}"].exit_code == number % 7
        assert rig.text(f"j{number}") == f"{number}\n"
    await rig.client.forget([attempt.key for attempt in attempts])
    await poll(lambda: len(os.listdir(f"/proc/{pid}/fd")) == before)  # what the next ones need is made again
    assert children(pid) == launchers(rig)


# -- the fence


@rigged
async def test_the_fence_ends_attempts_while_the_agent_is_stopped(rig: Rig, arguments: tuple[str, ...]) -> None:
    rig.client.close()
    body = (
        "await s.start([StartAttempt(key='gone', argv=('/bin/sleep', '1000'), env={}),"
        " StartAttempt(key='deaf', argv=('/bin/sh', '-c', 'trap \"\" TERM; while :; do sleep 1000; done'),"
        " env={'PATH': '/bin:/usr/bin'}, grace_s=600),"
        " StartAttempt(key='kept', argv=('/bin/sleep', '1000'), env={}, on_partition='keep')])\n"
        "n = 0\n"
        "while n < 3: n += len([e for e in await s.next_events() if isinstance(e, Started)])\n"
        "await s.fence(boottime_s() + 1.0, 0.1)\n"
        "print('ready', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"
    )
    with agent(rig.state, arguments, body) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        await poll(lambda: (stopped := read_process(process.pid)) is not None and stopped.state == "T")
        await rig.connect(spawn_if_absent=False)
        listed = await rig.client.list()
        rig.events += listed.ended
        gone, deaf = await rig.ended("gone"), await rig.ended("deaf")
        assert (gone.reason, gone.signal) == ("fence", signal.SIGTERM)
        assert (deaf.reason, deaf.signal) == ("fence", signal.SIGKILL)
        assert [started.key for started in (await rig.client.list()).running] == ["kept"]


@rigged
async def test_nothing_starts_behind_the_fence_until_it_is_moved(rig: Rig) -> None:
    await rig.client.fence(boottime_s() - 1, 5.0)
    ended = await rig.run(sh("a", "exit 0"))
    assert (ended.reason, ended.proof, ended.pid) == ("fence", "never-ran", None)
    await rig.client.fence(boottime_s() + 600, 5.0)
    assert (await rig.run(sh("b", "exit 0"))).reason == "exit"
    await rig.client.fence(None, 5.0)
    assert (await rig.run(sh("c", "exit 0"))).reason == "exit"
    with pytest.raises(SupervisorRefused, match="invalid-argument"):
        await rig.client.fence(-1.0, 5.0)


# -- the supervisor itself


def launchers(rig: Rig) -> list[int]:
    """The compiled launcher, if there is one."""
    found = []
    for pid in children(rig.client.identity.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"moorage-launcher\0"):
                found.append(pid)
    return found


async def launcher(rig: Rig) -> int:
    """The compiled launcher, as soon as it has its name: before its exec it has the supervisor's."""
    await poll(lambda: len(launchers(rig)) == 1)
    return launchers(rig)[0]


def asked_its_launcher(rig: Rig, key: str) -> bool:
    """Whether the supervisor waits for its launcher's answer: between the journal's record and that it never sleeps."""
    if key not in read_journal(rig.state / JOURNAL_NAME):
        return False
    supervisor = read_process(rig.client.identity.pid)
    return supervisor is not None and supervisor.state == "S"


@rigged
async def test_a_killed_supervisor_takes_its_jobs_along_and_the_next_tells(
    rig: Rig, arguments: tuple[str, ...]
) -> None:
    identity = rig.client.identity
    await rig.run(sh("before", "exit 4"))
    await rig.client.start([sh("main", "exec sleep 1000"), sh("tree", f"setsid {IN_SHELL} & wait")])
    main, tree = await rig.started("main"), await rig.started("tree")
    grandchild = int((await rig.line("tree"))[0])
    processes = [(pid, read_process(pid)) for pid in (main.pid, tree.pid, *launchers(rig))]
    os.kill(identity.pid, signal.SIGKILL)
    gone = await asyncio.wait_for(rig.client.wait_gone(), WAIT_S)
    assert not gone.silent
    await poll(lambda: not any(lives(pid, process) for pid, process in processes))
    await rig.connect()
    assert rig.client.identity != identity
    rig.events.clear()
    rig.events += (await rig.client.list()).ended
    for key, started in (("main", main), ("tree", tree)):
        ended = await rig.ended(key)
        assert (ended.reason, ended.proof) == ("supervisor-died", "scan" if arguments else "cgroup")
        assert (ended.exit_code, ended.signal, ended.pid) == (None, None, started.pid)
    assert not lives(grandchild)
    # The end that was told before is still known.
    assert rig.ends()["before"].exit_code == 4


def test_without_a_mark_the_next_supervisor_cannot_prove(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.client.start([sh("j", "exec sleep 1000", env={})])
        pid = (await rig.started("j")).pid
        os.kill(rig.client.identity.pid, signal.SIGKILL)
        await poll(lambda: not lives(pid))
        await rig.connect()
        listed = await rig.client.list()
        assert [unproven.key for unproven in listed.unproven] == ["j"]
        with pytest.raises(SupervisorRefused, match="unproven"):
            await rig.client.start([sh("j", "exit 0")])
        await rig.client.forget(["j"])  # as once an operator has said that its GPUs are well
        assert (await rig.client.list()).unproven == ()
        assert (await rig.run(sh("j", "exit 0"))).exit_code == 0

    with_rig(tmp_path, ("--no-cgroup",), scenario)


@rigged
async def test_a_second_supervisor_is_refused(rig: Rig) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "moorage.worker.supervisor",
        "--state",
        str(rig.state),
        env={"PYTHONPATH": ROOTS},
        stderr=asyncio.subprocess.PIPE,
    )
    _, output = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == EXIT_HELD
    assert f"another supervisor (pid {rig.client.identity.pid}) holds" in output.decode()
    await rig.client.list()


async def test_two_agents_at_once_find_one_supervisor(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    state = tmp_path / "state"
    both = await asyncio.gather(*(Supervised.connect(state, arguments=arguments) for _ in range(2)))
    assert both[0].identity == both[1].identity
    both[0].close()
    await both[1].shutdown(0)


async def test_a_long_path_of_the_state_folder_works(tmp_path: Path) -> None:
    async with rig_at(tmp_path / ("x" * 120) / "state") as rig:
        assert (await rig.run(sh("j", "exit 0"))).exit_code == 0


@rigged
async def test_only_the_owner_and_no_job_may_speak_to_it(rig: Rig) -> None:
    assert stat.S_IMODE(rig.state.stat().st_mode) == 0o700
    assert stat.S_IMODE((rig.state / SOCKET_NAME).stat().st_mode) == 0o600
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom moorage.worker.supervisor.client import *\n"
        "async def main():\n"
        "    try: await Supervised.connect(Path(sys.argv[1]), False)\n"
        "    except SupervisorRefused as refused: print(refused)\n"
        "asyncio.run(main())\n"
    )
    argv = (sys.executable, "-c", script, str(rig.state))
    await rig.run(StartAttempt(key="j", argv=argv, env={"PYTHONPATH": ROOTS}))
    assert "not-permitted" in rig.text("j")
    assert "is a job's" in rig.text("j")


@rigged
async def test_a_frame_that_is_no_frame_closes_only_that_connection(rig: Rig) -> None:
    for junk in (b"\xff" * 8, framed(b"abc", 3), framed(b"abc", 3)[:-1] + b"d"):
        with socket.socket(socket.AF_UNIX) as raw:
            folder = os.open(rig.state, os.O_PATH)
            raw.connect(f"/proc/self/fd/{folder}/{SOCKET_NAME}")
            os.close(folder)
            raw.sendall(junk)
            raw.settimeout(WAIT_S)
            said = b""
            while data := await asyncio.to_thread(raw.recv, 65536):
                said += data
            assert b"invalid-frame" in said
    await rig.client.list()


@needs_compiled
def test_a_launcher_that_dies_is_replaced_and_its_jobs_run_on(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.client.start([sh("long", "exec sleep 1000")])
        long = await rig.started("long")
        first = await launcher(rig)
        os.kill(first, signal.SIGKILL)
        await poll(lambda: not lives(first))
        assert (await rig.run(sh("j", "exit 0"))).exit_code == 0
        assert launchers(rig) != [first]
        assert lives(long.pid)

    with_rig(tmp_path, ("--no-cgroup",), scenario)


@needs_compiled
@pytest.mark.parametrize("proof", ["cgroup", "walk"])
def test_a_start_whose_launcher_dies_is_told_as_one_that_may_have_run(tmp_path: Path, proof: str) -> None:
    async def scenario(rig: Rig) -> None:
        first = await launcher(rig)
        os.kill(first, signal.SIGSTOP)
        starting = rig.client.start([sh("j", "echo ran")])
        await poll(lambda: asked_its_launcher(rig, "j"))
        os.kill(first, signal.SIGKILL)
        await starting
        ended = await rig.ended("j")
        assert (ended.reason, ended.stage) == ("start-failed", "launcher")
        assert ended.proof == proof
        assert (await rig.run(sh("next", "exit 0"))).exit_code == 0

    with_rig(tmp_path, arguments_of(proof), scenario)


@rigged
async def test_sigterm_ends_attempts_first(rig: Rig) -> None:
    await rig.client.start([sh("j", "trap 'exit 6' TERM; echo up; while :; do sleep 0.05; done")])
    await rig.line("j")
    os.kill(rig.client.identity.pid, signal.SIGTERM)
    assert (await rig.ended("j")).exit_code == 6
    await asyncio.wait_for(rig.client.wait_gone(), WAIT_S)
    with pytest.raises(SupervisorGone):
        await rig.client.list()
    with pytest.raises(SupervisorUnavailable):
        await Supervised.connect(rig.state, spawn_if_absent=False)
    # What the agent did not deal with, the next supervisor still tells.
    await rig.connect()
    assert [(ended.key, ended.exit_code) for ended in (await rig.client.list()).ended] == [("j", 6)]


@rigged
async def test_a_supervisor_that_is_slow_keeps_its_jobs_while_their_lease_runs(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a host that is overloaded, or whose disk takes no writes for a while: all of its jobs were killed."""
    await rig.client.start([sh("j", "exec sleep 1000")])
    job = (await rig.started("j")).pid
    agent = await Supervised.connect(rig.state, False, ping_interval_s=0.05, silence_s=600, silence_fenced_s=0.3)
    await agent.fence(boottime_s() + 600, 5.0)
    os.kill(rig.client.identity.pid, signal.SIGSTOP)
    try:
        await poll(lambda: "the supervisor has not answered for" in caplog.text)
    finally:
        os.kill(rig.client.identity.pid, signal.SIGCONT)
    assert list((await agent.list()).living) == ["j"]
    assert lives(job)
    assert len(caplog.records) == 1, "it is told once"
    agent.close()


@rigged
async def test_a_silent_supervisor_is_given_up_soon_once_the_fence_has_passed(rig: Rig) -> None:
    """It does not end its jobs, so they must end with it before they begin elsewhere."""
    agent = await Supervised.connect(rig.state, False, ping_interval_s=0.05, silence_s=9e9, silence_fenced_s=0.3)
    await agent.fence(boottime_s() + 0.5, 5.0)
    os.kill(rig.client.identity.pid, signal.SIGSTOP)
    try:
        assert (await asyncio.wait_for(agent.wait_gone(), WAIT_S)).silent
    finally:
        agent.kill()
        agent.close()


@rigged
async def test_a_silent_supervisor_is_noticed_and_can_be_killed(rig: Rig) -> None:
    await rig.client.start([sh("j", "exec sleep 1000")])
    job = (await rig.started("j")).pid
    pid = rig.client.identity.pid
    impatient = await Supervised.connect(rig.state, False, ping_interval_s=0.05, silence_s=0.3, silence_fenced_s=9e9)
    os.kill(pid, signal.SIGSTOP)
    gone = await asyncio.wait_for(impatient.wait_gone(), WAIT_S)
    assert gone.silent
    with pytest.raises(SupervisorGone):
        await impatient.next_events()
    impatient.kill()
    await poll(lambda: not lives(pid) and not lives(job))
    impatient.close()
    await rig.connect()
    assert rig.client.identity.pid != pid
