"""`ssh`, `systemctl`, `chown` and `curl` as the walk of a page calls them: the first argument is which.

A machine is a folder below $PLAYED. `ssh root@h1 …` runs a command here whose paths are that folder's; `systemctl` runs
the units of `deploy/systemd` so, each in a session of its own whose leader stands in a file of `pids`. A port that
`ports.json` has for a machine, or for all of them, stands in place of the page's.
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


def moved(text: str, machine: str) -> str:
    for there in ("/etc/moorage", "/var/lib/moorage"):
        text = text.replace(there, f"{HERE / machine}{there}")
    ports = json.loads((HERE / "ports.json").read_text())
    for port, instead in {**ports.get("", {}), **ports.get(machine, {})}.items():
        text = text.replace(port, str(instead))
    return text


def ssh(where: str, *words: str) -> int:
    machine = where.removeprefix("root@")
    command = moved(" ".join(words), machine)
    typed = moved(sys.stdin.read(), machine) if words[0] == "tee" else None  # a file that the page writes there
    env = {**os.environ, "MACHINE": machine}
    return subprocess.run(["sh", "-c", command], env=env, input=typed, text=True).returncode


class Unit:
    def __init__(self, name: str) -> None:
        parser = configparser.ConfigParser(interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string((UNITS / f"{name}.service").read_text())
        self.name = name
        self.of = {key: moved(value, MACHINE) for key, value in parser["Service"].items()}
        self.pid = HERE / "pids" / f"{MACHINE}.{name}"

    def argv(self, line: str) -> list[str]:
        program, *words = shlex.split(self.of[line])
        name = Path(program).name
        return [{"moorage": f"{Path(sys.executable).parent}/moorage"}.get(name, name), *words]

    def start(self) -> None:
        env = {**os.environ, **dict(word.split("=", 1) for word in self.of.get("Environment", "").split())}
        env["MOORAGE_SETTINGS"] = moved("/etc/moorage/moorage.toml", MACHINE)  # where a machine's own is found
        log = (HERE / f"{MACHINE}.{self.name}.log").open("ab")
        if self.of.get("Type") == "oneshot":
            (HERE / MACHINE / "var/lib" / self.of["StateDirectory"]).mkdir(mode=0o700, exist_ok=True)
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
    verbs = {each.__name__: each for each in (ssh, systemctl, curl, chown)}
    sys.exit(verbs[sys.argv[1]](*sys.argv[2:]))
