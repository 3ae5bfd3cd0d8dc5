"""`ssh`, `systemctl`, `chown` and `curl` as the walk of a page calls them: the first argument is which.

A machine is a folder below $PLAYED. `ssh root@h1 …` runs a command here in a mount namespace in which that machine's
`/etc/moorage` and `/var/lib/moorage` are at their places; `systemctl` runs the units of `deploy/systemd` there, each in
a session of its own whose leader stands in a file of `pids`. A port that `ports.json` has for a machine, or for all of
them, stands in place of the page's.
"""

from __future__ import annotations

import configparser
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(os.environ["PLAYED"])
MACHINE = os.environ.get("MACHINE", "")
UNITS = Path(__file__).resolve().parents[3] / "deploy" / "systemd"


def with_ports(text: str, machine: str) -> str:
    ports = json.loads((HERE / "ports.json").read_text())
    for port, instead in {**ports.get("", {}), **ports.get(machine, {})}.items():
        text = text.replace(port, str(instead))
    return text


def ssh(where: str, *words: str) -> int:
    name = where.removeprefix("root@")
    command = with_ports(" ".join(words), name)
    typed = with_ports(sys.stdin.read(), name) if words[0] == "tee" else None  # a file that the page writes there
    argv = ["unshare", "--mount", sys.executable, "-S", __file__, "machine", name, "sh", "-c", command]
    return subprocess.run(argv, env={**os.environ, "MACHINE": name}, input=typed, text=True).returncode


def machine(name: str, *argv: str) -> int:
    """In a mount namespace of its own already: let this be that machine, and run the command."""
    if not MACHINE:
        for place, copy in (("/etc", "real/etc"), ("/var/lib", "real/lib")):
            _bind(HERE / copy, place)
    for place in ("/etc/moorage", "/var/lib/moorage"):
        _bind(HERE / name / place[1:], place)
    os.execvp(argv[0], argv)


def _bind(source: Path, place: str) -> None:
    subprocess.run(["mount", "--bind", str(source), place], check=True)


class Unit:
    def __init__(self, name: str) -> None:
        parser = configparser.ConfigParser(interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string((UNITS / f"{name}.service").read_text())
        self.name = name
        self.of = {key: with_ports(value, MACHINE) for key, value in parser["Service"].items()}
        self.pid = HERE / "pids" / f"{MACHINE}.{name}"

    def argv(self, line: str) -> list[str]:
        program, *words = shlex.split(self.of[line])
        name = Path(program).name
        return [{"moorage": f"{Path(sys.executable).parent}/moorage"}.get(name, name), *words]

    def start(self) -> None:
        env = {**os.environ, **dict(word.split("=", 1) for word in self.of.get("Environment", "").split())}
        log = (HERE / f"{MACHINE}.{self.name}.log").open("ab")
        if self.of.get("Type") == "oneshot":
            Path("/var/lib", self.of["StateDirectory"]).mkdir(mode=0o700, exist_ok=True)
            for line in ("ExecStart", "ExecStartPost"):
                subprocess.run(self.argv(line), env=env, check=True, stdout=log, stderr=log)
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            if self.of.get("Type") == "notify":
                env["NOTIFY_SOCKET"] = str(HERE / f"{self.pid.name}.notify")
                manager.bind(env["NOTIFY_SOCKET"])
                manager.settimeout(0.5)
            process = subprocess.Popen(
                self.argv("ExecStart"), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            self.pid.write_text(str(process.pid))
            while self.of.get("Type") == "notify" and _said(manager) != b"READY=1":
                if process.poll() is not None:
                    sys.exit(f"{self.name} of {MACHINE} has ended with {process.returncode}")
        (HERE / f"{self.pid.name}.notify").unlink(missing_ok=True)

    def kill(self) -> None:
        pid = int(self.pid.read_text())
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.01)


def _said(manager: socket.socket) -> bytes:
    try:
        return manager.recv(100)
    except TimeoutError:
        return b""


def systemctl(verb: str, *words: str) -> int:
    for name in words:
        if name.startswith("--") or name.endswith(".timer"):
            continue
        unit = Unit(name)
        if verb == "kill":  # Restart=always has it start again
            unit.kill()
        unit.start()
    return 0


def curl(*words: str) -> int:
    import urllib.request  # the other commands start without it

    try:
        with urllib.request.urlopen(words[-1], timeout=5) as answer:
            print(answer.read().decode())
    except OSError:
        return 22
    return 0


def chown(*words: str) -> int:
    return 0


if __name__ == "__main__":
    verbs = {each.__name__: each for each in (ssh, systemctl, curl, chown, machine)}
    sys.exit(verbs[sys.argv[1]](*sys.argv[2:]))
