#!/usr/bin/env bash
# Behaviour: POST /containers/ID/wait of a container that was created and not started is answered at once, with a status code.
# Versions: docker 20.10.24 and 26.1.5, podman 4.3.1 and 5.4.2
# Guess: It waits until the container has been started and has ended, as its name says.
# Seen: Answered within a moment with status 200 and StatusCode 0, as if the program had succeeded; by podman 4 now and then with -1.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages
bounded 120 <<'EOF'
import json

from findings.engines import engines


def look(engine):
    status, answer = engine.ask("POST", f"/containers/{engine.create('sleep', '600')}/wait")
    code = json.loads(answer)["StatusCode"]
    return status == 200 and code in (0, -1), {"status, StatusCode": (status, code)}


engines(look)
EOF
