"""The part of the `nats` command that the docs use, over a real connection: `req`, `pub`, `sub --count`.

The command itself is a Go program that no package index of ours carries, so the tests of the docs type into this one.
It takes the same words, prints payloads as `nats --raw` does, and finds the server and its login in the same way:
$NATS_URL, else the selected context.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import nats

from moorage.bus.contexts import resolve


async def main() -> None:
    parser = argparse.ArgumentParser(prog="nats")
    parser.add_argument("verb", choices=("req", "pub", "sub"))
    parser.add_argument("subject")
    parser.add_argument("payload", nargs="?", default="")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--timeout", type=lambda text: float(text.removesuffix("s")), default=5.0)
    parser.add_argument("-H", "--header", action="append", default=[])
    given = parser.parse_args()
    context = resolve()
    user, password, _ = context.login
    connection = await nats.connect(context.url, user=user or None, password=password or None)
    headers = dict(each.split(":", 1) for each in given.header) or None
    payload = given.payload.encode()
    if given.verb == "req":
        answer = await connection.request(given.subject, payload, given.timeout, headers=headers)
        print(answer.data.decode())
    elif given.verb == "pub":
        await connection.publish(given.subject, payload, headers=headers)
    else:
        subscription = await connection.subscribe(given.subject)
        print(f"Subscribing on {given.subject}", file=sys.stderr, flush=True)
        heard = 0
        async for message in subscription.messages:
            print(message.data.decode(), flush=True)
            heard += 1
            if heard == given.count:
                break
    await connection.close()


if __name__ == "__main__":
    asyncio.run(main())
