"""The runner of a VM without a VM: a program in the place of QEMU that plays the guest, or none."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest

from moorage.system.archives import BadArchive
from moorage.worker.drivers.vm import initramfs
from moorage.worker.drivers.vm.passthrough import lock, lock_path
from moorage.worker.drivers.vm.runner import PORTS, UP, Plan, bring_back, command, pump, pump_all, script
from moorage.worker.supervisor.client import python_variables
from tests.unit.worker.made_up_pci import AUDIO, GPU, Host

MARK: Final = b"\x04mark"

#: in the place of QEMU: takes the ports from its command line, and does what a guest of `guest.sh` would do
PLAYED: Final = """#!{python}
import io, os, re, socket, sys, tarfile
words = " ".join(sys.argv)
job, out, err, work = (socket.socket(fileno=int(re.search(f"id={{name}},fd=([0-9]+)", words)[1])) for name in
                       ("job", "out", "err", "work"))
job.sendall(b"up\\n")
lines = job.makefile("rb")
size, mark, keep = lines.readline().decode().split()
{first}
text = lines.read(int(size))
{does}
"""
ENDS: Final = 'for each in (out, err, work): each.sendall(b"\\x04" + mark.encode())\n'


def plan(tmp_path: Path, qemu: str, **fields: Any) -> Plan:
    base = tmp_path / "base.img"
    base.write_bytes(b"")
    given: dict[str, Any] = {
        "argv": ["true"], "cwd": "/work", "folder": "", "keep": False, "folder_bytes": 1 << 20, "qemu": qemu,
        "kernel": "none", "initramfs": str(base), "accelerators": ["tcg"], "boot_s": 120.0, "cpus": 1, "memory_mib": 64,
    }  # fmt: skip
    return Plan(**given | fields)


def played(tmp_path: Path, does: str, first: str = "") -> str:
    path = tmp_path / "played"
    path.write_text(PLAYED.format(python=sys.executable, does=does, first=first))
    path.chmod(0o755)
    return str(path)


def begin(wanted: Plan, **variables: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-P", "-m", "moorage.worker.drivers.vm.runner", msgspec.json.encode(wanted).decode()]
    env = python_variables() | {f"GUEST_{name}": value for name, value in variables.items()}
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(runner: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = runner.communicate(timeout=150)
    return runner.returncode, out.decode(), err.decode()


# ------------------------------------------------------------------------------------------------------- the parts


@pytest.mark.parametrize("cuts", [[3], [7], [9], [12], [1, 2, 8, 10, 13]])
def test_a_stream_ends_with_its_mark_wherever_it_is_cut(cuts: list[int]) -> None:
    whole = b"words\x04ma" + MARK + b"too late"
    pieces = iter([whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)])
    got = bytearray()
    pump(lambda size: next(pieces), MARK, got.extend)
    assert bytes(got) == b"words\x04ma"


def test_a_stream_without_a_mark_is_handed_on_whole() -> None:
    pieces = iter([b"words\x04ma", b""])
    got = bytearray()
    pump(lambda size: next(pieces), MARK, got.extend)
    assert bytes(got) == b"words\x04ma"


def test_a_full_disk_of_the_host_does_not_hold_up_the_guest(tmp_path: Path) -> None:
    tries = []

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            tries.append(data)
            raise OSError(errno.ENOSPC, "No space left on device")

    pairs = {name: socket.socketpair() for name in ("out", "err", "work")}
    vm: Any = SimpleNamespace(ports={name: ours for name, (ours, _) in pairs.items()})
    pumps = pump_all(vm, MARK, plan(tmp_path, "qemu", keep=True), Full())
    pairs["work"][1].sendall(b"x" * 300_000)
    for _, theirs in pairs.values():
        theirs.sendall(MARK)
    for pumping in pumps:
        pumping.join(60)
        assert not pumping.is_alive()
    for ours, theirs in pairs.values():
        ours.close()
        theirs.close()
    assert len(tries) == 1


def test_the_script_says_each_word_and_variable_as_it_was_sent(tmp_path: Path) -> None:
    odd = 'it\'s $HOME `id` "x"\nline two \\'
    wanted = plan(tmp_path, "qemu", argv=["python3", "-c", "import os,sys; print(sys.argv[1:], dict(os.environ))", odd],
                  cwd=str(tmp_path))  # fmt: skip
    text = script(wanted, {"PATH": os.environ["PATH"], "A.B-c": odd})
    done = subprocess.run(["/bin/sh"], input=text, env={"LEFT": "1"}, capture_output=True, check=True)
    shown = done.stdout.decode()
    assert shown.count(repr(odd)) == 2
    assert "'A.B-c'" in shown
    assert "LEFT" not in shown


def test_the_archive_of_a_folder_has_its_files_links_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "data").write_bytes(b"12345")
    (folder / "link").symlink_to("sub/data")
    base = tmp_path / "base.img"
    base.write_bytes(b"x" * 5)
    made = io.BytesIO()
    initramfs.write(made, base, str(folder))
    found, at, raw = {}, 8, made.getvalue()
    while at < len(raw):
        assert raw[at : at + 6] == b"070701"
        numbers = [int(raw[at + 6 + 8 * place : at + 14 + 8 * place], 16) for place in range(13)]
        mode, size, name_size = numbers[1], numbers[6], numbers[11]
        name = raw[at + 110 : at + 110 + name_size - 1].decode()
        at += 110 + name_size
        at += -at % 4
        found[name] = (oct(mode), raw[at : at + size])
        at += size
        at += -at % 4
    assert raw[:8] == b"xxxxx\0\0\0"
    assert found.pop("moorage/init")[0] == "0o100755"
    assert list(found)[-1] == "TRAILER!!!"
    assert {name: each for name, each in found.items() if name.startswith("work/")} == {
        "work/sub": ("0o40755", b""),
        "work/link": ("0o120777", b"sub/data"),
        "work/sub/data": ("0o100644", b"12345"),
    }


# ---------------------------------------------------------------------------------------- the runner as a process


def test_where_qemu_does_not_start_the_runner_says_so_and_ends_by_a_signal(tmp_path: Path) -> None:
    assert finish(begin(plan(tmp_path, "/no/qemu"))) == (
        -signal.SIGKILL,
        "",
        "moorage: the VM did not come up: /no/qemu: No such file or directory\n",
    )


@pytest.mark.slow
def test_a_guest_that_gives_no_sign_is_given_up_and_with_kvm_tcg_is_tried(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho 'Kernel panic: no init'\nexec sleep 600\n")
    silent.chmod(0o755)
    code, _, said = finish(begin(plan(tmp_path, str(silent), boot_s=4.0, accelerators=["kvm", "tcg"])))
    assert code == -signal.SIGKILL
    no_sign = "no sign of it within 4 s: Kernel panic: no init\n"
    assert said == f"moorage: with kvm: {no_sign}moorage: the VM did not come up: {no_sign}"


@pytest.mark.slow
def test_output_code_and_the_files_come_back_and_secrets_are_in_no_argument(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").write_text("goes")
    does = """
assert b"hush" in text and b"hush" not in words.encode() and keep == "yes"
out.sendall(b"words\\n"); err.sendall(b"trouble\\n")
made = io.BytesIO()
with tarfile.open(fileobj=made, mode="w") as archive:
    info = tarfile.TarInfo("./new"); info.size = 3; archive.addfile(info, io.BytesIO(b"abc"))
work.sendall(made.getvalue())
"""
    qemu = played(tmp_path, does + ENDS + 'job.sendall(b"exit 7\\n"); job.recv(1)')
    runner = begin(plan(tmp_path, qemu, folder=str(folder), keep=True), TOKEN="hush")
    assert finish(runner) == (7, "words\n", f"{UP} (tcg, 1 CPUs, 64 MiB)\ntrouble\n")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"new": "abc"}


@pytest.mark.parametrize("cut", [0, 512, 700, 1536, 1636, 2048, 3072, None])
def test_an_archive_that_was_cut_short_leaves_the_folder_as_it_was(tmp_path: Path, cut: int | None) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in ("one", "two"):
            info = tarfile.TarInfo(name)
            info.size = 600
            archive.addfile(info, io.BytesIO(b"x" * 600))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").write_text("stays")
    wanted = plan(tmp_path, "qemu", folder=str(folder), keep=True)
    if cut is None:
        bring_back(made, wanted)
        assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]
    else:
        with pytest.raises(BadArchive):
            bring_back(io.BytesIO(made.getvalue()[:cut]), wanted)
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"old": "stays"}


@pytest.mark.slow
def test_files_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    does = """
made = io.BytesIO()
with tarfile.open(fileobj=made, mode="w") as archive:
    archive.addfile(tarfile.TarInfo("../escaped"), io.BytesIO(b""))
work.sendall(made.getvalue())
"""
    qemu = played(tmp_path, does + ENDS + 'job.sendall(b"exit 0\\n"); job.recv(1)')
    code, _, said = finish(begin(plan(tmp_path, qemu, folder=str(folder), keep=True)))
    assert code == 1
    assert "the files of the job are not kept: '../escaped' leaves the folder" in said
    assert not (tmp_path / "escaped").exists()


@pytest.mark.slow
def test_without_an_end_line_no_code_is_made_up(tmp_path: Path) -> None:
    code, out, said = finish(begin(plan(tmp_path, played(tmp_path, 'out.sendall(b"half"); sys.exit(0)'))))
    assert (code, out) == (-signal.SIGKILL, "half")
    assert said.endswith("moorage: the VM ended without reporting the end of its job\n")


@pytest.mark.slow
def test_signals_reach_the_guest_by_name_and_before_the_guest_is_up_they_end_the_runner(tmp_path: Path) -> None:
    does = 'out.sendall(b"ready\\n"); said = lines.readline(); out.sendall(said)\n'
    qemu = played(tmp_path, does + ENDS + 'job.sendall(b"exit 143\\n"); job.recv(1)')
    runner = begin(plan(tmp_path, qemu))
    assert runner.stdout is not None
    assert runner.stdout.readline() == b"ready\n"
    runner.send_signal(signal.SIGTERM)
    assert finish(runner)[:2] == (143, "TERM\n")

    silent = tmp_path / "silent"
    silent.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    silent.chmod(0o755)
    runner = begin(plan(tmp_path, str(silent)))
    # a checkpoint signal that comes too early is for a job that is not there yet
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert runner.poll() is None
        time.sleep(0.01)
    runner.send_signal(signal.SIGUSR1)
    runner.send_signal(signal.SIGTERM)
    assert finish(runner)[0] == -signal.SIGTERM
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.slow
def test_a_signal_that_comes_while_the_guest_is_told_its_job_is_passed_on_to_the_job(tmp_path: Path) -> None:
    does = "out.sendall(lines.readline())\n" + ENDS + 'job.sendall(b"exit 143\\n"); job.recv(1)'
    qemu = played(tmp_path, does, first="os.kill(os.getppid(), 15)")
    # more than a socket takes at once, so that the runner is still writing
    variables = {f"V{number}": "x" * 100_000 for number in range(8)}
    assert finish(begin(plan(tmp_path, qemu), **variables))[:2] == (143, "TERM\n")


def test_a_disk_image_is_read_in_the_format_of_its_name_and_never_written(tmp_path: Path) -> None:
    ports = dict.fromkeys((*PORTS, "console"), 3)
    words = command(plan(tmp_path, "qemu", disk="/images/a,b.qcow2"), "tcg", 4, ports)
    assert "if=none,id=disk,file=/images/a,,b.qcow2,format=qcow2,snapshot=on" in words
    assert words[words.index("-append") + 1].endswith(" moorage.disk")
    assert "moorage.disk" not in " ".join(command(plan(tmp_path, "qemu"), "tcg", 4, ports))


@pytest.mark.slow
def test_what_a_guest_writes_to_its_disk_is_bounded_and_its_trouble_is_told(tmp_path: Path) -> None:
    does = """
try:
    with open(sys.argv[0] + ".grown", "wb", buffering=0) as grown:
        for _ in range(64): grown.write(bytes(4096))
        out.sendall(b"0\\n")
except OSError as error:
    out.sendall(f"{grown.name and error.errno}\\n".encode())
"""
    qemu = played(tmp_path, does + ENDS + 'job.sendall(b"exit 0\\n"); job.recv(1)')
    code, out, _ = finish(begin(plan(tmp_path, qemu, disk="/images/a.raw", disk_bytes=1 << 16)))
    assert (code, out) == (0, f"{errno.EFBIG}\n")
    assert Path(f"{qemu}.grown").stat().st_size == 1 << 16

    path = Path(played(tmp_path, ""))
    path.write_text(path.read_text().replace('b"up', 'b"no file system here'))
    code, _, said = finish(begin(plan(tmp_path, str(path))))
    assert code == -signal.SIGKILL
    assert "the VM did not come up: its guest says: no file system here" in said


@pytest.mark.slow
def test_a_gpu_is_locked_by_qemu_too_and_one_that_is_not_bound_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path / "root")
    wanted: dict[str, Any] = {"devices": [GPU, AUDIO], "lock": str(lock_path(tmp_path, GPU)), "root": str(host.root)}
    refused = f"moorage: the VM did not come up: the GPU {GPU} does not belong to this VM\n"
    host.bind(GPU, "vfio-pci")
    qemu = played(tmp_path, "import time; out.sendall(b'ready\\n'); time.sleep(600)")
    assert finish(begin(plan(tmp_path, qemu, **wanted))) == (-signal.SIGKILL, "", refused)
    host.bind(AUDIO, "vfio-pci")

    runner = begin(plan(tmp_path, qemu, **wanted))
    assert runner.stdout is not None
    assert runner.stdout.readline() == b"ready\n"
    assert finish(begin(plan(tmp_path, qemu, **wanted))) == (-signal.SIGKILL, "", refused)
    [child] = Path(f"/proc/{runner.pid}/task/{runner.pid}/children").read_text().split()
    runner.kill()  # as a fence may, before it comes to QEMU
    runner.wait(60)
    assert lock(lock_path(tmp_path, GPU)) is None
    os.kill(int(child), signal.SIGKILL)
    kept = None
    while kept is None:
        kept = lock(lock_path(tmp_path, GPU))
    os.close(kept)
    runner.communicate(timeout=60)
