"""NVIDIA's MPS control daemon, played: the program `nvidia-cuda-mps-control`, with the answers of version 550.163.01.

`test_mps_control.py` asks it and the real one the same. With `-f` it is the daemon of its pipe directory:
it has the same sockets, and a server, which is a process, once the first client is there. Its limits of memory stand
in the file `limits` of that directory, to which the stub of libcuda keeps. A client is a process that
connects and says `CLIENT`; that is the played part. One that has said `KERNEL` has work on the GPU: if it goes and was
not terminated before, its server has a fault until all clients are gone, and the others fail, as an H200 showed on
2026-11-27; their pids are in the file `failed`. Without `-f` it sends its standard input to the daemon.

What stands in the file `mood` beside this program changes it, or one daemon alone where a pid stands there: `wedged`
answers nothing, `slow` is late, `deaf` sets no limits, `fault` has a server with a fault,
`refuses` terminates no client, `dies` ends at once, `late`
does not listen yet. The commands that it got are in the file `commands`.
"""

import os
import selectors
import signal
import socket
import struct
import sys
import time

HOME = os.path.dirname(os.path.abspath(__file__))
PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
CONTROL = f"{PIPE}/control"
END = b"\0"


def mood() -> list[str]:
    try:
        with open(f"{HOME}/mood") as file:
            return file.read().split()
    except OSError:
        return []


def note(name: str, text: str) -> None:
    with open(f"{HOME}/{name}", "a") as file:
        file.write(f"{text}\n")


def ask() -> int:
    daemon = socket.socket(socket.AF_UNIX)
    try:
        daemon.connect(CONTROL)
    except OSError:
        print("Cannot find MPS control daemon process")
        return 1
    for line in sys.stdin:
        try:
            daemon.sendall(line.rstrip("\n").encode() + b"\n")
            said = b""
            while not said.endswith(END):
                piece = daemon.recv(65536)
                if not piece:
                    return 0 if line.startswith("quit") else 1
                said += piece
        except OSError:
            return 0 if line.startswith("quit") else 1
        sys.stdout.write(said[:-1].decode())
        sys.stdout.flush()
    return 0


def shown(mib: int) -> str:
    return f"{mib // 1024}G" if mib >= 1024 else f"{mib}M"


def size(word: str) -> int:
    number = word.rstrip("GM")
    return int(number) * (1024 if word.endswith("G") else 1) if number.isdigit() else 0


class Daemon:
    def __init__(self) -> None:
        self.percent = 100.0
        self.mib: dict[str, int] = {}
        self.server = 0
        self.server_percent = 100.0
        self.server_mib: dict[str, int] = {}
        self.clients: dict[socket.socket, int] = {}
        self.computing: set[int] = set()
        self.is_faulty = False
        self.events = selectors.DefaultSelector()
        self.over = False

    def limits(self) -> None:
        """Write down what its clients may have of each device: the stub of libcuda keeps to the file."""
        with open(f"{PIPE}/limits.new", "w") as file:
            file.writelines(
                f"{device} {mib}M\n" for device, mib in (self.server_mib if self.server else self.mib).items()
            )
        os.rename(f"{PIPE}/limits.new", f"{PIPE}/limits")

    def main(self) -> int:
        if "dies" in mood():
            print("no device", flush=True)
            return 1
        probe = socket.socket(socket.AF_UNIX)
        try:
            probe.connect(CONTROL)
            print("An instance of this daemon is already running")
            return 1
        except OSError:
            pass
        note("starts", f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}")
        while "late" in mood():
            time.sleep(0.02)
        for name in ("control", "control_privileged"):
            if os.path.exists(f"{PIPE}/{name}"):
                os.unlink(f"{PIPE}/{name}")
        listeners = []
        for name, mode in (("control", 0o666), ("control_privileged", 0o700)):
            listeners.append(socket.socket(socket.AF_UNIX))
            listeners[-1].bind(f"{PIPE}/{name}")
            os.chmod(f"{PIPE}/{name}", mode)
            listeners[-1].listen(64)
        with open(f"{PIPE}/nvidia-cuda-mps-control.pid", "w") as file:
            file.write(str(os.getpid()))
        self.limits()
        for each in listeners:
            self.events.register(each, selectors.EVENT_READ)
        while not self.over:
            for found, _ in self.events.select():
                if found.data is None:
                    peer, _ = found.fileobj.accept()  # type: ignore[union-attr]
                    self.events.register(peer, selectors.EVENT_READ, bytearray())
                else:
                    self.read(found.fileobj, found.data)  # type: ignore[arg-type]
        for each in listeners:
            each.close()
        return 0

    def read(self, peer: socket.socket, buffer: bytearray) -> None:
        piece = peer.recv(65536)
        if not piece:
            pid = self.clients.pop(peer, None)
            if pid in self.computing:
                self.computing.discard(pid)
                self.is_faulty = True
                for other in self.clients.values():
                    note("failed", str(other))
            self.is_faulty = self.is_faulty and bool(self.clients)
            self.events.unregister(peer)
            peer.close()
            return
        buffer += piece
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            self.answer(peer, line.decode().split())

    def answer(self, peer: socket.socket, words: list[str]) -> None:
        if words[:1] == ["CLIENT"]:
            # of the one that connects, as this process knows it, also where it is in a container
            self.clients[peer] = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            if not self.server:
                self.server = os.spawnv(os.P_NOWAIT, "/bin/sleep", ["nvidia-cuda-mps-server", "1000"])
                self.server_percent, self.server_mib = self.percent, dict(self.mib)
            peer.sendall(b"ok" + END)
            return
        if words[:1] == ["KERNEL"]:
            self.computing.add(self.clients[peer])
            peer.sendall(b"ok" + END)
            return
        note("commands", " ".join(words))
        now = mood()
        if any(word.isdecimal() for word in now) and str(os.getpid()) not in now:
            now = []
        if "wedged" in now:
            return
        if "slow" in now:
            time.sleep(0.3)
        said = self.said(words, now)
        self.limits()
        peer.sendall("".join(f"{line}\n" for line in said).encode() + END)
        if words[0] == "quit":
            if self.server:
                os.kill(self.server, signal.SIGKILL)
                os.waitpid(self.server, 0)
            self.over = True

    def said(self, words: list[str], now: list[str]) -> list[str]:
        command, rest = words[0], words[1:]
        pid = self.server
        if command == "quit":
            return []
        if command == "get_server_list":
            return [str(pid)] if pid else []
        if command == "start_server":
            return []
        if command == "set_default_active_thread_percentage":
            if 0 < float(rest[0]) <= 100 and "deaf" not in now:
                self.percent = float(rest[0])
            return [str(self.percent)]
        if command == "get_default_active_thread_percentage":
            return [str(self.percent)]
        if command == "set_default_device_pinned_mem_limit":
            if size(rest[1]) and "deaf" not in now:
                self.mib[rest[0]] = size(rest[1])
            return []
        if command == "get_default_device_pinned_mem_limit":
            return [shown(self.mib[rest[0]])] if rest[0] in self.mib else []
        if command == "terminate_client":
            found = pid == int(rest[0]) != 0
            if "refuses" in now:
                return ["Insufficient privileges"]
            self.computing.discard(int(rest[1]))
            return ["0"] if found else [f"Server {rest[0]} not found", f"Server {rest[0]} not found!", "1"]
        known = {"get_client_list", "get_server_status", "set_device_pinned_mem_limit", "get_device_pinned_mem_limit",
                 "set_active_thread_percentage", "get_active_thread_percentage", "get_device_client_list"}  # fmt: skip
        if command not in known:
            return [f'Unknown command "{command}"']
        if int(rest[0]) != pid or not pid:
            return [f"Server {rest[0]} not found"]
        if command == "get_client_list":
            return [str(client) for client in self.clients.values()]
        if command == "get_server_status":
            return ["FAULT" if "fault" in now or self.is_faulty else "ACTIVE"]
        if command == "set_device_pinned_mem_limit":
            self.server_mib[rest[1]] = size(rest[2])
            return []
        if command == "get_device_pinned_mem_limit":
            return [shown(self.server_mib.get(rest[1], 0))]
        if command == "set_active_thread_percentage":
            self.server_percent = float(rest[1])
        return [str(self.server_percent)]


if __name__ == "__main__":
    sys.exit(Daemon().main() if sys.argv[1:] == ["-f"] else ask())
