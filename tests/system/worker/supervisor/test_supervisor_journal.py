"""What a supervisor leaves for the next one."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from moorage.system.proctree import boot_id, boottime_s, children, kill_trees, read_environ
from moorage.system.record_file import NotThisForm, RecordFile
from moorage.worker.supervisor import journal as journal_module
from moorage.worker.supervisor.attempt import LEGAL, Attempt, IllegalTransition, State
from moorage.worker.supervisor.former_attempts import FormerAttempts
from moorage.worker.supervisor.journal import (
    FORM,
    Forgotten,
    Left,
    Over,
    Record,
    Running,
    Starting,
    encoded,
    open_journal,
    read_journal,
    records_of,
)
from moorage.worker.supervisor.protocol import JOURNAL_NAME, Ended, StartAttempt


def starting(key: str, boot: str = "b", cgroup: str = "", marks: tuple[bytes, ...] = ()) -> Starting:
    return Starting(key=key, boot_id=boot, boottime_s=1.0, cgroup=cgroup, marks=marks)


RECORDS: list[Record] = [
    starting("a"),
    starting("b", marks=(b"MOORAGE_JOB=b",)),
    Running(key="a", pid=7),
    Over(ended=Ended(key="a", reason="exit", proof="walk", exit_code=3)),
    starting("c"),
    Forgotten(keys=("a",)),
    Running(key="c", pid=9),
]


def test_the_journal_tells_what_is_not_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read_journal(path) == {}
    journal = open_journal(path, RECORDS[:2])
    journal.append(encoded(RECORDS[2:5]))
    journal.append(encoded(RECORDS[5:]))
    journal.close()
    left = read_journal(path)
    assert list(left) == ["b", "c"]
    assert left["b"].starting == RECORDS[1]
    assert (left["c"].pid, left["c"].ended) == (9, None)
    open_journal(path, records_of(left)).close()
    assert read_journal(path) == left


def test_a_journal_of_another_release_is_left_alone_and_no_supervisor_starts(tmp_path: Path) -> None:
    """It was replaced by an empty one: what it named was forgotten, and jobs began again beside their processes."""
    path = tmp_path / JOURNAL_NAME
    other = FORM._replace(magic=b"moorage-supervisor-journal-9\n")
    RecordFile(path, other, encoded([starting("a")])).close()
    content = path.read_bytes()
    command = [sys.executable, "-m", "moorage.worker.supervisor", "--state", str(tmp_path), "--no-cgroup"]
    started = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (started.returncode, "use the release that wrote it" in started.stderr) == (1, True)
    assert path.read_bytes() == content
    with pytest.raises(NotThisForm):
        read_journal(path)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_end_hurts_only_the_last_record(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    open_journal(path, [starting("a"), starting("b")]).close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_journal(path)) == ["a"]


def test_a_damaged_record_hides_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    open_journal(path, RECORDS).close()
    data = path.read_bytes()
    second = data.index(FORM.mark, data.index(FORM.mark) + 1)
    ends = data.index(FORM.mark, second + 1)
    for at in range(second, ends):  # each byte of it: its mark, its length, its checksum, its body
        for wrong in (data[at] ^ 0xFF, data[at] ^ 1):
            path.write_bytes(data[:at] + bytes([wrong]) + data[at + 1 :])
            assert list(read_journal(path)) == ["c"]


def test_records_inside_a_torn_one_are_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    open_journal(path, [starting("a"), starting("b")]).close()
    torn = path.read_bytes()[:-5]
    open_journal(path, [starting("c")]).close()
    path.write_bytes(torn + path.read_bytes()[len(FORM.magic) :])
    assert list(read_journal(path)) == ["a", "c"]


def test_compaction_waits_until_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FORM", FORM._replace(bytes_max=100))
    path = tmp_path / "journal"
    journal = open_journal(path, [])
    for number in range(100):
        journal.append(encoded([starting(f"j{number}")]))
        if journal.is_large:
            before = journal.bytes_written
            journal.replace(encoded(records_of(read_journal(path))))
            assert journal.bytes_written == path.stat().st_size == before
    assert len(read_journal(path)) == 100
    journal.append(encoded([Forgotten(keys=tuple(read_journal(path)))]))
    journal.replace(encoded(records_of(read_journal(path))))
    assert path.read_bytes() == FORM.magic
    journal.close()


def test_a_boot_ends_every_attempt() -> None:
    former = FormerAttempts(boot_id(), {"a": Left(starting=starting("a", boot="another"), pid=1)})
    (ended,) = former.clear(5.0)
    assert (ended.reason, ended.proof, ended.ended_boottime_s) == ("supervisor-died", "reboot", 5.0)
    assert not former.waiting


def test_a_cgroup_that_is_gone_was_empty(tmp_path: Path) -> None:
    left = Left(starting=starting("a", boot=boot_id(), cgroup=str(tmp_path / "gone")))
    (ended,) = FormerAttempts(boot_id(), {"a": left}).clear(5.0)
    assert ended.proof == "cgroup"


def test_an_attempt_that_nothing_can_tell_stays_unproven() -> None:
    former = FormerAttempts(boot_id(), {"a": Left(starting=starting("a", boot=boot_id())), "b": Left(pid=3)})
    assert former.clear(5.0) == []
    assert set(former.found) == {"a", "b"}
    assert former.drop("a")
    assert not former.drop("a")
    assert set(former.found) == set(former.waiting) == {"b"}


def no_descriptors(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_an_end_is_reported_though_another_attempt_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = starting("b", boot=boot_id(), marks=(b"MOORAGE_JOB=of no process",))
    former = FormerAttempts(
        boot_id(), {"a": Left(starting=starting("a", boot="another"), pid=1), "b": Left(starting=marked)}
    )
    monkeypatch.setattr("moorage.worker.supervisor.former_attempts.descendants", no_descriptors)
    assert [ended.key for ended in former.clear(5.0)] == ["a"]
    assert set(former.waiting) == {"b"}
    assert "Too many open files" in former.found["b"].message


def test_attempts_that_were_not_searched_for_yet_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = starting("a", boot=boot_id(), marks=(b"MOORAGE_JOB=of no process",))
    former = FormerAttempts(boot_id(), {"a": Left(starting=marked)})
    monkeypatch.setattr("moorage.worker.supervisor.former_attempts.scan_marks", no_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        former.clear(5.0)
    assert set(former.found) == set(former.waiting) == {"a"}


def test_what_hides_in_a_session_from_before_an_attempt_is_not_the_attempt_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.worker.supervisor.former_attempts.START_SLACK_S", 0.0)
    script = "read word; env -i /bin/sleep 1000 & env -i /usr/bin/setsid /bin/sleep 1000 & echo begun; wait"
    shell = subprocess.Popen(["sh", "-c", script], stdin=-1, stdout=-1, text=True, start_new_session=True)
    with shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        try:
            before_s = boottime_s()
            wait_for(lambda: boottime_s() > before_s + 0.1)
            marked = starting("a", boot=boot_id(), marks=(b"MOORAGE_JOB=of no process",))
            begun_s = boottime_s()
            marked = msgspec.structs.replace(marked, boottime_s=begun_s)
            wait_for(lambda: boottime_s() > begun_s + 0.1)  # the kernel tells starts in hundredths of a second
            shell.stdin.write("go\n")
            shell.stdin.flush()
            assert shell.stdout.readline() == "begun\n"
            wait_for(lambda: [read_environ(pid) for pid in children(shell.pid)] == [frozenset()] * 2)
            wait_for(lambda: any(os.getsid(pid) == pid for pid in children(shell.pid)))
            same, own = sorted(children(shell.pid), key=lambda pid: os.getsid(pid) == pid)
            former = FormerAttempts(boot_id(), {"a": Left(starting=marked)})
            assert former.clear(boottime_s()) == []
            assert own in former.found["a"].pids
            assert same not in former.found["a"].pids
        finally:
            kill_trees([shell.pid])


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells."""
    ends_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def test_an_attempt_without_a_readable_start_is_handed_on_to_the_next_supervisor(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    open_journal(path, [Running(key="a", pid=7)]).close()
    left = read_journal(path)
    open_journal(path, records_of(left)).close()
    assert read_journal(path) == left == {"a": Left(pid=7)}


def test_only_legal_transitions_pass() -> None:
    for before in State:
        for after in State:
            attempt = Attempt(start=StartAttempt(key="k", argv=("x",), env={}), child=None, marks=(), state=before)
            if after in LEGAL[before]:
                attempt.go(after)
                assert attempt.state is after
            else:
                with pytest.raises(IllegalTransition):
                    attempt.go(after)
