"""A process that follows jobs by the SDK: `follower.py URL TENANT PREFIX COUNT [output]`.

Says `ready` once it hears `PREFIX-0` to `PREFIX-<COUNT - 1>`, which are submitted after that, and `over` with the sum
of the revisions that it saw once each of them has ended. A gap, a double or a follower that does not end is a failure.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from moorage.client import AsyncClient, Event, Watch


async def main() -> None:
    url, tenant, prefix, count, *output = sys.argv[1:]
    async with AsyncClient(url, tenant=tenant, timeout=60.0) as moorage:
        watches = [
            Watch(moorage, name, output=bool(output), request=moorage.request((), key=name, fields={"driver": "noop"}))
            for name in (f"{prefix}-{number}" for number in range(int(count)))
        ]
        for watch in watches:
            await watch.open()
        print("ready", flush=True)
        print("over", sum(await asyncio.gather(*(followed(watch) for watch in watches))), flush=True)


async def followed(watch: Watch) -> int:
    revisions = [change.rev async for item in watch if isinstance(item, Event) for change in item.changes]
    assert revisions == list(range(1, len(revisions) + 1)), revisions
    await watch.close()
    return len(revisions)


if __name__ == "__main__":
    uvloop.run(main())
