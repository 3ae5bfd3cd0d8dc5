"""Run one job in a VM: start QEMU, send the job to the guest, pass its output on, and exit with its code.

The supervisor starts this process for the job, so ends, time-outs and fences work as for processes. Its one argument is
a `Plan`. The job's variables, secrets among them, are its own variables with a prefix, and reach the guest through a
port. The steps of a job:

1. the guest's first process (`guest.sh`) opens the ports and writes "up"
2. the runner writes the job as a script: its variables, its folder, its command
3. the guest's output arrives on two ports; signals to the runner are passed on by name
4. the job's folder comes back as a tar file, if the job keeps files; then "exit CODE" comes

If no such code comes, the runner ends itself by a signal, which no code of a guest can look like. If the job's folder
cannot be kept, the runner exits with 1.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final, NoReturn

import msgspec

from moorage.system.archives import BadArchive, empty, unpack
from moorage.worker.drivers.vm import initramfs
from moorage.worker.drivers.vm.images import format_of
from moorage.worker.drivers.vm.passthrough import Passthrough, lock

#: prefix of each of the job's variables
VARIABLE: Final = "GUEST_"
#: prefix of the line on stderr that says that the guest runs: earlier lines are the runner's own
UP: Final = "moorage: the VM is up"
#: ports for the job's script, its output, and its folder on the way back
PORTS: Final = ("job", "out", "err", "work")
#: how long KVM may take: if it does not work, QEMU reports no error, and the guest never starts
KVM_S_MAX: Final = 30.0
#: signals that are passed on to the job's processes
SIGNALS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
#: longest wait for the first sign of the guest; between two such waits, signals are handled
WAIT_S_MAX: Final = 1.0
#: bytes of the console's end that are kept for a guest that did not boot
CONSOLE_BYTES_MAX: Final = 4096
#: the end of each tar file: two blocks of zeros
TAR_END: Final = bytes(1024)
_PIECE_BYTES: Final = 1 << 16


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner must do. `folder` is the attempt's folder, "" for none; with `keep` it comes back from the guest.

    `disk` is a disk image whose file system is the root of the job's command, "" for none. What the guest writes to it
    goes into an unnamed file of at most `disk_bytes`, which ends with the VM. `devices` are the PCI addresses of
    functions that vfio-pci has, and `lock` is the file that keeps them for this VM. `root` has the `sys` of the host.
    """

    argv: list[str]
    cwd: str
    folder: str
    keep: bool
    folder_bytes: int
    qemu: str
    kernel: str
    initramfs: str
    accelerators: list[str]
    boot_s: float
    cpus: int
    memory_mib: int
    user: str | None = None
    disk: str = ""
    disk_bytes: int = 0
    devices: list[str] = []
    lock: str = ""
    root: str = "/"


class NotUp(Exception):
    """The VM did not come up: it cannot be prepared, QEMU did not start, or its guest did not boot in time.

    The message says why, with the last sign of the guest if QEMU started.
    """


class Asked(Exception):
    """The runner was asked to end before the guest was up."""

    def __init__(self, number: int) -> None:
        self.number: Final = number


class Vm:
    """QEMU with one guest. Making it starts QEMU, or raises NotUp.

    `wait_until_up` waits until the guest has booted, `close` ends it.
    """

    def __init__(self, plan: Plan, accelerator: str, initrd: int, kept: int | None = None) -> None:
        self.ports: dict[str, socket.socket] = {}
        self._console = bytearray()
        theirs: dict[str, socket.socket] = {}
        for name in (*PORTS, "console"):
            self.ports[name], theirs[name] = socket.socketpair()
        passed = {name: each.fileno() for name, each in theirs.items()}
        env = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE)}
        if plan.folder:  # QEMU writes the guest's changes of its disk there
            env["TMPDIR"] = os.path.dirname(plan.folder)
        limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if plan.disk:
                bound = plan.disk_bytes if most == resource.RLIM_INFINITY else min(plan.disk_bytes, most)
                resource.setrlimit(resource.RLIMIT_FSIZE, (bound, most))
            self._qemu = subprocess.Popen(
                command(plan, accelerator, initrd, passed),
                env=env,
                restore_signals=False,  # SIGXFSZ stays ignored: a full disk must not end QEMU
                pass_fds=(*passed.values(), initrd, *(() if kept is None else (kept,))),
                stdin=subprocess.DEVNULL,
                stdout=passed["console"],
                stderr=passed["console"],
                start_new_session=True,  # the supervisor's SIGTERM to the runner's group is for the job, not for QEMU
            )
        except OSError as error:
            raise NotUp(f"{plan.qemu}: {error.strerror}") from None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
            for each in theirs.values():
                each.close()
        self._listens = threading.Thread(target=self._read_console, daemon=True)
        self._listens.start()

    def wait_until_up(self, seconds: float) -> None:
        """Return once the guest's first process has opened the ports. Else end QEMU and raise NotUp."""
        port, ends_s = self.ports["job"], time.monotonic() + seconds
        port.settimeout(seconds)
        why = "QEMU ended"
        try:
            # Python runs no handler of a signal that came just before a wait until that wait is over: so wait in parts
            while not select.select([port], (), (), WAIT_S_MAX)[0]:
                if time.monotonic() > ends_s:
                    raise TimeoutError
            said = next(self.lines(), "")
            if said == "up":
                port.settimeout(None)
                return
            if said:
                why = f"its guest says: {said}"
        except TimeoutError:
            why = f"no sign of it within {seconds:g} s"
        except OSError:
            pass  # QEMU ended with unread data
        self.close()
        told = bytes(self._console).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(told) if line.strip()), "its console is empty")
        raise NotUp(f"{why}: {last[:200]}")

    def lines(self) -> Iterator[str]:
        """Yield the guest's lines on the job's port, stripped. Ends, or raises OSError, when QEMU is gone."""
        with self.ports["job"].makefile("r", encoding="utf-8", errors="replace", newline="\n") as port:
            while line := port.readline(256):
                yield line.strip()

    def wait_for_code(self) -> int | None:
        """Return the job's exit code once the guest sends it; None if the VM ends without it."""
        with contextlib.suppress(OSError):
            for line in self.lines():
                word, _, value = line.partition(" ")
                if word == "exit" and value.isdecimal():
                    return int(value) & 0xFF
        return None

    def write_guest(self, data: bytes) -> None:
        """Write to the guest; does nothing once QEMU is gone."""
        with contextlib.suppress(OSError):
            self.ports["job"].sendall(data)

    def close(self) -> None:
        """End QEMU, and with it all that runs in the guest."""
        self._qemu.kill()
        self._qemu.wait()
        self._listens.join()

    def _read_console(self) -> None:
        with contextlib.suppress(OSError):
            while piece := self.ports["console"].recv(_PIECE_BYTES):
                self._console += piece
                del self._console[:-CONSOLE_BYTES_MAX]


def command(plan: Plan, accelerator: str, initrd: int, ports: dict[str, int]) -> list[str]:
    """Return the command line of QEMU. `initrd` and the values of `ports` are descriptors that QEMU inherits."""
    words = [
        plan.qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-sandbox", "on,obsolete=deny,spawn=deny,resourcecontrol=deny",
        "-machine", "q35", "-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "max",
        "-m", str(plan.memory_mib), "-smp", str(plan.cpus),
        "-kernel", plan.kernel, "-initrd", f"/proc/self/fd/{initrd}",
        "-append", f"console=ttyS0 quiet panic=-1 rdinit=/{initramfs.INIT}" + (" moorage.disk" if plan.disk else ""),
        "-chardev", f"socket,id=console,fd={ports['console']}", "-serial", "chardev:console",
        "-device", "virtio-rng-pci", "-device", "virtio-serial-pci",
    ]  # fmt: skip
    for name in PORTS:
        words += ["-chardev", f"socket,id={name},fd={ports[name]}"]
        words += ["-device", f"virtserialport,chardev={name},name=moorage.{name}"]
    if plan.disk:
        name = plan.disk.replace(",", ",,")
        words += ["-drive", f"if=none,id=disk,file={name},format={format_of(plan.disk)},snapshot=on"]
        words += ["-device", "virtio-blk-pci,drive=disk"]
    for at, address in enumerate(plan.devices, 1):
        words += ["-device", f"pcie-root-port,id=gpu{at},chassis={at}"]
        words += ["-device", f"vfio-pci,host={address},bus=gpu{at}"]
    if plan.user is not None:
        words += ["-runas", plan.user]
    return words


def script(plan: Plan, variables: dict[str, str]) -> bytes:
    """Return the script for the guest's shell. It deletes its own file first, because that has the job's secrets."""
    words = [*(f"{name}={value}" for name, value in variables.items()), *plan.argv]
    line = " ".join(map(shlex.quote, words))
    return os.fsencode(f"rm -f /run/job\ncd {shlex.quote(plan.cwd)} || exit 126\nexec env -i {line}\n")


def keep_devices(plan: Plan) -> int | None:
    """Lock the devices while this process or its QEMU lives, and return the descriptor; None without devices.

    Raises NotUp if the devices are not this VM's. An agent gives devices without a lock back to the host, so their
    driver is checked again after locking.
    """
    if not plan.devices:
        return None
    try:
        descriptor = lock(Path(plan.lock))
    except OSError as error:
        raise NotUp(f"the lock of its GPU, {plan.lock}, cannot be taken: {error.strerror or error}") from None
    passthrough = Passthrough(Path(plan.root))
    if descriptor is None or not all(map(passthrough.is_handed_on, plan.devices)):
        raise NotUp(f"the GPU {plan.devices[0]} does not belong to this VM")
    # QEMU pins the guest's whole memory; if the limit cannot be raised, QEMU reports the error
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return descriptor


def boot(plan: Plan) -> tuple[Vm, str]:
    """Return a VM that has booted and its accelerator, with `SIGNALS` blocked; the caller must close it.

    Raises NotUp.
    """
    kept = keep_devices(plan)
    with os.fdopen(os.memfd_create("initramfs"), "w+b") as initrd:
        try:
            initramfs.write(initrd, Path(plan.initramfs), plan.folder)
        except OSError as error:
            raise NotUp(f"its initramfs cannot be made: {error.strerror or error}") from None
        initrd.flush()
        for accelerator in plan.accelerators:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until there is something to close
            vm = Vm(plan, accelerator, initrd.fileno(), kept)
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                vm.wait_until_up(min(plan.boot_s, KVM_S_MAX) if accelerator == "kvm" else plan.boot_s)
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
                return vm, accelerator
            except NotUp as error:
                if accelerator == plan.accelerators[-1]:
                    raise
                write_line(f"moorage: with {accelerator}: {error}")
            except BaseException:
                vm.close()
                raise
    raise NotUp("there is no accelerator")


def pump(receive: Callable[[int], bytes], mark: bytes, into: Callable[[bytes], object]) -> None:
    """Pass on what a port receives, up to the mark or to the port's end; the mark is not passed on.

    Bytes that may be the beginning of the mark wait for the next ones.
    """
    held = b""
    with contextlib.suppress(OSError):
        while piece := receive(_PIECE_BYTES):
            held += piece
            at = held.find(mark)
            if at >= 0:
                into(held[:at])
                return
            keeps = next(size for size in range(len(mark) - 1, -1, -1) if held.endswith(mark[:size]))
            into(held[: len(held) - keeps])
            held = held[len(held) - keeps :]
    into(held)


def run(plan: Plan, variables: dict[str, str]) -> int | None:
    """Run the job and return its exit code; None if the VM ended without one.

    Raises NotUp, Asked if a SIGTERM came before the guest was up, and BadArchive and OSError if the job's folder cannot
    be kept.
    """

    def asked(number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:  # other signals are meant for the job, which does not run yet
            raise Asked(number)

    for each in SIGNALS:
        signal.signal(each, asked)
    vm, accelerator = boot(plan)
    try:
        write_line(f"{UP} ({accelerator}, {plan.cpus} CPUs, {plan.memory_mib} MiB)")
        secret = secrets.token_hex(16)
        with tempfile.TemporaryFile(dir=os.path.dirname(plan.folder) or None) as archive:
            pumps = pump_all(vm, b"\x04" + secret.encode(), plan, archive)
            text = script(plan, variables)
            vm.write_guest(f"{len(text)} {secret} {'yes' if plan.keep else 'no'}\n".encode() + text)
            # signals stay blocked for handlers: one that came while the job was sent to the guest is the job's, too
            threading.Thread(target=pass_on_signals, args=(vm,), daemon=True).start()
            code = vm.wait_for_code()
            if code is None:
                vm.close()
            for pumping in pumps:
                pumping.join()
            vm.close()
            if code is not None and plan.keep:
                bring_back(archive, plan)
        return code
    finally:
        vm.close()


def bring_back(archive: BinaryIO, plan: Plan) -> None:
    """Replace what is in the job's folder by what the archive holds.

    The archive is checked first: if it is cut short or invalid (BadArchive), the folder stays as it is. If the disk
    refuses something later (OSError, or BadArchive for a name), the folder holds a part of it.
    """
    archive.seek(0)
    unpack(archive, plan.folder, plan.folder_bytes, only="\0")  # no attempt has this name, so all are only checked
    archive.seek(max(0, archive.seek(0, os.SEEK_END) - len(TAR_END)))
    if archive.read() != TAR_END:
        raise BadArchive("it was cut short")
    empty(plan.folder)
    archive.seek(0)
    unpack(archive, plan.folder, plan.folder_bytes)


def pass_on_signals(vm: Vm) -> NoReturn:
    """Pass on each signal to the guest by its name. `SIGNALS` must be blocked in all threads.

    A handler would not do: a signal that comes just before the main thread waits for the guest would be lost.
    """
    while True:
        vm.write_guest(f"{signal.Signals(signal.sigwait(SIGNALS)).name.removeprefix('SIG')}\n".encode())


def pump_all(vm: Vm, mark: bytes, plan: Plan, archive: BinaryIO) -> list[threading.Thread]:
    """Start to pass on the ports' output, and return the threads that do so; each ends with its port's mark or end.

    The archive gets at most twice the folder's limit, since it has headers, too; the rest is dropped. Without `keep` it
    gets nothing.
    """

    room = 2 * plan.folder_bytes if plan.keep else 0

    def spool(data: bytes) -> None:
        nonlocal room
        room -= len(data)
        if room >= 0:
            try:
                archive.write(data)
            except (
                OSError
            ):  # the disk is full: an incomplete archive is refused, and the guest must get rid of the rest
                room = 0

    sinks = {"out": partial(write_all, 1), "err": partial(write_all, 2), "work": spool}
    pumps = [threading.Thread(target=pump, args=(vm.ports[name].recv, mark, sink)) for name, sink in sinks.items()]
    for pumping in pumps:
        pumping.start()
    return pumps


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data; drop the rest of it at an OSError, such as that there is no reader any more."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def write_line(line: str) -> None:
    """Write one line to stderr."""
    write_all(2, f"{line}\n".encode(errors="replace"))


def end_by(number: int) -> NoReturn:
    """End this process by this signal."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)


def main() -> None:
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    prefix = len(VARIABLE)
    variables = {name[prefix:]: value for name, value in os.environ.items() if name.startswith(VARIABLE)}
    try:
        code = run(plan, variables)
    except Asked as asked:
        end_by(asked.number)
    except NotUp as error:
        write_line(f"moorage: the VM did not come up: {error}")
        end_by(signal.SIGKILL)
    except (BadArchive, OSError) as error:
        write_line(f"moorage: the files of the job are not kept: {error}")
        sys.exit(1)
    if code is None:
        write_line("moorage: the VM ended without reporting the end of its job")
        end_by(signal.SIGKILL)
    sys.exit(code)


if __name__ == "__main__":
    main()
