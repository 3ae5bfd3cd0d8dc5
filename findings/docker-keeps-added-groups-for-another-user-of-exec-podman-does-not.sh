#!/usr/bin/env bash
# Behaviour: A command that is run in a container as another user has the container's added groups (GroupAdd) with docker, and has not with podman.
# Versions: docker 20.10.24 and 26.1.5, podman 4.3.1 and 5.4.2
# Guess: The same with both, whose API is the same: the user's own groups alone, since another user was named.
# Seen: docker: groups 4321 and 777; podman: 4321 alone. For the container's own user both give 777.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages
bounded 120 <<'EOF'
from findings.engines import engines, streams


def look(engine):
    container = engine.run("sleep", "600", host={"GroupAdd": ["777"]})
    groups = {}
    for name, words in (("its own user", {}), ("another user", {"User": "4321:4321"})):
        frames = engine.execute(container, "id", "-G", **words)[2]
        groups[name] = "777" in streams(frames)["out"].split()
    return groups == {"its own user": True, "another user": engine.name == "docker"}, groups


engines(look)
EOF
