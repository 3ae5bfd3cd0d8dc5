#!/usr/bin/env bash
# Behaviour: A WorkingDir that the image lacks is made at the start: docker makes it root's, podman the user's.
# Versions: docker 20.10.24 and 26.1.5, podman 4.3.1 and 5.4.2
# Guess: docker makes it; podman refuses the start, as it does for a missing mount point's source.
# Seen: Both start. The folder's owner is 0 with docker, so a user of the container cannot write there, and 4321 with podman.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages
bounded 120 <<'EOF'
from findings.engines import engines


def look(engine):
    container = engine.run("stat", "-c", "%u", ".", User="4321:4321", WorkingDir="/not/there")
    code, owner = engine.ended(container)["ExitCode"], engine.output(container)["out"]
    expected = "0" if engine.name == "docker" else "4321"
    return (code, owner) == (0, expected), {"ExitCode, owner": (code, owner)}


engines(look)
EOF
