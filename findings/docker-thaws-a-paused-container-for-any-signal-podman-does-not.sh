#!/usr/bin/env bash
# Behaviour: Docker lets a paused container run on when it is sent any signal, even one that the container ignores. podman keeps it paused, and refuses to stop it.
# Versions: docker 20.10.24, podman 4.3.1
# Guess: A signal waits until the container is unpaused, with both; SIGKILL ends it. A stop is refused by both.
# Seen: docker: after TERM, USR1 and WINCH the container runs, a handler of its has run, and a stop ends it. podman: it is still paused, its handler runs once it is unpaused, and a stop is answered 500. SIGKILL ends it with both.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

packages
bounded 180 <<'EOF'
from findings.engines import engines

# It never ends by itself, and says which signals it was sent.
LOOP = "trap 'echo USR1' USR1; trap 'echo TERM' TERM; echo up; while :; do sleep 0.2; done"


def look(engine):
    def paused():
        made = engine.run("sh", "-c", LOOP)
        engine.until(lambda: "up" in engine.output(made)["out"], "the program runs")
        engine.ask("POST", f"/containers/{made}/pause")
        assert engine.state(made)["Status"] == "paused"
        return made

    def heard(made, signal):
        engine.until(lambda: signal in engine.output(made)["out"], f"{signal} is heard")

    thaws = engine.name == "docker"
    after = {}
    for signal in ("TERM", "USR1", "WINCH"):
        made = paused()
        status, _ = engine.ask("POST", f"/containers/{made}/kill?signal={signal}")
        if thaws and signal != "WINCH":
            heard(made, signal)
        after[signal] = status, engine.state(made)["Status"]
        if not thaws:
            assert "TERM" not in engine.output(made)["out"]
            engine.ask("POST", f"/containers/{made}/unpause")
            if signal != "WINCH":
                heard(made, signal)
        engine.ask("DELETE", f"/containers/{made}?force=1")
    made = paused()
    status, _ = engine.ask("POST", f"/containers/{made}/stop?t=1")
    after["a stop"] = status, engine.state(made)["Status"]
    status, _ = engine.ask("POST", f"/containers/{made}/kill?signal=KILL")
    after["KILL"] = "ended", engine.ended(made)["ExitCode"]
    return after == {
        **dict.fromkeys(("TERM", "USR1", "WINCH"), (204, "running" if thaws else "paused")),
        "a stop": (204, "exited") if thaws else (500, "paused"),
        "KILL": ("ended", 137),
    }, {"after": after}


engines(look)
EOF
