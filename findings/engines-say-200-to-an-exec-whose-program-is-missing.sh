#!/usr/bin/env bash
# Behaviour: The start of an exec whose program is not there is answered with 200; the engine's own sentence comes as output of the command.
# Versions: docker 20.10.24 and 26.1.5, podman 4.3.1 and 5.4.2
# Guess: A client error with the sentence in its body, as the start of a container without its program gives; else code 127.
# Seen: 200 by both. docker writes the sentence to standard output and keeps the code 126; podman writes it to standard error and keeps 127.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages
bounded 120 <<'EOF'
from findings.engines import engines, streams


def look(engine):
    made, status, frames = engine.execute(engine.run("sleep", "600"), "no-such-program")
    engine.until(lambda: not engine.command(made)["Running"], "the command is over")
    said, code = streams(frames), engine.command(made)["ExitCode"]
    where = next((name for name, text in said.items() if "no-such-program" in text), "nowhere")
    expected = ("out", 126) if engine.name == "docker" else ("err", 127)
    return (status, where, code) == (200, *expected), {"status, stream, ExitCode": (status, where, code)}


engines(look)
EOF
