"""A process that follows jobs by the SDK: `follower.py URL TENANT PREFIX COUNT [output] [own]`.

As `AsyncClient.run` does it: the first `CROWD` on their jobs' own subjects, the others by the tenant's frames; with
`own` each on its job's own subject.

Says `ready` once it hears `PREFIX-0` to `PREFIX-<COUNT - 1>`, which are submitted after that, and `over` with the sum
of the revisions that it saw once each of them has ended, and waits to be killed. A gap, a double or a follower that
does not end is a failure.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from moorage.client import AsyncClient, AsyncWatch
from moorage.client.events import Event


async def main() -> None:
    url, tenant, prefix, count, *how = sys.argv[1:]
    watches: list[AsyncWatch] = []
    async with AsyncClient(url, tenant=tenant, timeout=60.0) as moorage:
        for name in (f"{prefix}-{number}" for number in range(int(count))):
            events = "tenant" if moorage._wire._histories.is_crowded and "own" not in how else "job"
            request = moorage.request((), job=name, fields={"driver": "noop", "events": events})
            watches.append(AsyncWatch(moorage._wire._histories, name, to_submit=request, output="output" in how))
            await watches[-1].open()
        print("ready", flush=True)
        print("over", sum(await asyncio.gather(*(followed(watch) for watch in watches))), flush=True)
    await asyncio.Event().wait()  # its processor time can be read until it is killed


async def followed(watch: AsyncWatch) -> int:
    revisions = [change.rev async for item in watch if isinstance(item, Event) for change in item.changes]
    assert revisions == list(range(1, len(revisions) + 1)), revisions
    await watch.close()
    return len(revisions)


if __name__ == "__main__":
    uvloop.run(main())
