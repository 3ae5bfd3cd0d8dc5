#!/usr/bin/env bash
# Behaviour: podman 4.3 goes on to say Running with ExitCode 0 of a detached exec that has ended; podman 5 and docker tell its end and code.
# Versions: docker 20.10.24 and 26.1.5, podman 4.3.1 and 5.4.2
# Guess: All three know the end within a moment: it is the one thing the call is for.
# Seen: 3 s after the end of `exit 7`: podman 4 has Running true and ExitCode 0, and the pid of a process that is gone. podman 5 and docker: false and 7.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages
bounded 120 <<'EOF'
import time

from findings.engines import engines


def look(engine):
    made = engine.execute(engine.run("sleep", "600"), "sh", "-c", "exit 7", detach=True)[0]
    time.sleep(3)  # nothing tells of an end that the engine does not see
    told = engine.command(made)
    found = told["Running"], told["ExitCode"]
    is_old = (engine.name, engine.version[0]) == ("podman", "4")
    return found == ((True, 0) if is_old else (False, 7)), {"Running, ExitCode": found}


engines(look)
EOF
