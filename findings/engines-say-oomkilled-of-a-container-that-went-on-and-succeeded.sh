#!/usr/bin/env bash
# Behaviour: OOMKilled of a container's state is true if any process of it was killed for memory, also where its first process went on and exited with 0.
# Versions: docker 20.10.24 and 26.1.5, podman 5.4.2; not podman 4.3.1
# Guess: It says that the container itself was ended so; podman's is false otherwise.
# Seen: true beside ExitCode 0, by docker and by podman 5. podman 4 says false.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages
bounded 120 <<'EOF'
from findings.engines import engines

MEMORY = {"Memory": 32 << 20, "MemorySwap": 32 << 20}


def look(engine):
    state = engine.ended(engine.run("sh", "-c", "(x=$(seq 9999999)); exit 0", host=MEMORY))
    found = state["OOMKilled"], state["ExitCode"]
    expected = (engine.name, engine.version[0]) != ("podman", "4")
    return found == (expected, 0), {"OOMKilled, ExitCode": found}


engines(look)
EOF
