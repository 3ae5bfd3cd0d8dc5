#!/usr/bin/env bash
# Behaviour: Variables that a CDI spec sets are those of a container's main process and of no command of exec, though inspect shows them. The spec is read at each start, not when the container is made.
# Versions: podman 4.3.1
# Guess: A command of exec has the variables that inspect shows, those of the spec too; what the spec said when the container was made stays with it.
# Seen: The main process has GPU=first and inspect shows it; exec has no GPU, and sees the file that the spec mounts. After a change of the spec a restart has GPU=second. Without the spec a restart is refused, and leaves the container exited.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

packages
bounded 120 <<'EOF'
import ctypes
import json
import os
import subprocess
from pathlib import Path

from findings.engines import engines, streams

NEW_MOUNTS = 0x20000
PODMANS = "v4.0.0/libpod"
FOLDER = Path("/run/cdi")
SPEC = FOLDER / "example.json"
DEVICE = "example.com/gpu=0"

if os.geteuid() == 0:  # our specs are in a /run that nothing else sees
    assert ctypes.CDLL(None).unshare(NEW_MOUNTS) == 0
    for words in ("--make-rprivate /", "-t tmpfs none /run"):
        subprocess.run(["mount", *words.split()], check=True)
    FOLDER.mkdir()
    (FOLDER / "mounted").touch()


def say(value):
    mount = {"hostPath": f"{FOLDER}/mounted", "containerPath": "/tmp/mounted", "options": ["ro", "bind"]}
    edits = {"env": [f"GPU={value}"], "mounts": [mount]}
    devices = [{"name": "0", "containerEdits": edits}]
    SPEC.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "example.com/gpu", "devices": devices}))


def look(engine):
    say("as it was made")
    asked = {
        "image": engine.image,
        "command": ["sh", "-c", "echo main $GPU; exec sleep 600"],
        "devices": [{"path": DEVICE}],
        "netns": {"nsmode": "host"},
        "log_configuration": {"driver": "k8s-file"},
        "r_limits": [{"type": name, "soft": 1024, "hard": 1024} for name in ("nofile", "nproc")],
    }
    status, answer = engine.ask("POST", "/containers/create", asked, api=PODMANS)
    assert status == 201, answer
    made = json.loads(answer)["Id"]
    seen = {}

    def note(when):
        engine.until(lambda: "main" in engine.output(made)["out"], "the program runs")
        main = engine.output(made)["out"].splitlines()[-1]
        inside = streams(engine.execute(made, "sh", "-c", "echo exec $GPU; cat /tmp/mounted && echo mounted")[2])["out"]
        told = json.loads(engine.ask("GET", f"/containers/{made}/json")[1])["Config"]["Env"]
        seen[when] = main, inside.split("\n"), [each for each in told if each.startswith("GPU=")]

    say("first")
    status, answer = engine.ask("POST", f"/containers/{made}/start")
    assert status == 204, answer
    note("started")
    say("second")
    engine.ask("POST", f"/containers/{made}/restart?t=0")
    engine.until(lambda: "second" in engine.output(made)["out"] or len(seen) > 1, "the second start is told")
    note("after a change")
    SPEC.unlink()
    seen["without the spec"] = engine.ask("POST", f"/containers/{made}/restart?t=0")[0], engine.state(made)["Status"]
    return seen == {
        "started": ("main first", ["exec", "mounted"], ["GPU=first"]),
        "after a change": ("main second", ["exec", "mounted"], ["GPU=second"]),
        "without the spec": (500, "exited"),
    }, seen


engines(look, podman_alone=True)
EOF
