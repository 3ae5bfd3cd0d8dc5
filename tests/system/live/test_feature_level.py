"""A rolling upgrade of schedulers: the next release follows and writes the old format until an operator raises it."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest

from moorage.scheduler.core.ledger.records import FORMAT
from tests.servers import Server
from tests.system.cli import forks
from tests.system.live.stack import QUICK, Caller, RealProcess, Stack, caller, stack
from tests.waiting import until

#: this release's scheduler, but for one thing: it knows one format more
_NEXT: Final = """
import sys
from moorage.scheduler import main
from moorage.scheduler.core.ledger import records
records.FORMAT += 1
main.main()
"""


async def next_release(made: Stack, name: str) -> RealProcess:
    log = made.folder / f"scheduler-{len(made.processes)}.log"
    arguments = ["-c", _NEXT, "--nats", made.url, "--prefix", made.subjects.prefix, "--name", name]
    for key, value in QUICK.items():
        arguments += [f"--{key.replace('_', '-')}", f"{value:g}"]
    with log.open("ab") as out:
        environment = os.environ | {"MOORAGE_LEDGER_URL": made.ledger_url}
        process = await forks.python(*arguments, env=environment, out=out)
    made.processes.append(RealProcess(process, log))
    return made.processes[-1]


async def this_release(made: Stack, name: str) -> RealProcess:
    return await made.set_scheduler(name, QUICK, made.url, made.ledger_url)


async def heard(operator: Caller, *names: str) -> dict[str, Any]:
    """Wait until these schedulers and no others are heard; the fleet as the leader shows it then."""

    async def all_of_them() -> dict[str, Any] | None:
        fleet = await operator.fleet()
        return fleet if {row["scheduler"] for row in fleet["schedulers"]} == set(names) else None

    return dict(await until(all_of_them, 90, f"{names} heard"))


@pytest.mark.slow
async def test_schedulers_are_replaced_one_by_one_and_the_level_is_raised_last(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        old = [await this_release(made, "old-1")]
        await acme.leader()
        old.append(await this_release(made, "old-2"))
        fleet = await heard(acme, "old-1", "old-2")
        assert fleet["feature_level"] == FORMAT
        assert [(row["level"], row.get("leads", False)) for row in fleet["schedulers"]] == [
            (FORMAT, True), (FORMAT, False),
        ]  # fmt: skip
        await acme.submit("a", gpu={"model": "none"})

        # a new one takes over: what it writes, the old one still follows, and takes over from it
        new = [await next_release(made, "new-1")]
        await until(lambda: "folded" in new[0].words(), what="the new release standing by")
        assert await old[0].terminate() == 0
        await acme.leader(2)
        if (await acme.fleet())["leader"] == "old-2":
            assert await old[1].terminate() == 0
            await acme.leader(3)  # or the one that comes back may lead again
            old[1] = await this_release(made, "old-2")
            await until(lambda: "folded" in old[1].words(), what="the old release standing by")
        leader = await acme.fleet()
        assert leader["leader"] == "new-1"
        await acme.submit("b", gpu={"model": "none"})
        await heard(acme, "new-1", "old-2")
        refused = await acme.admin("feature-level", {"level": FORMAT + 1})
        assert (refused["kind"], refused["code"]) == ("error", "failed-precondition")
        assert "old-2 cannot" in refused["message"]
        await new[0].kill()
        assert (await acme.leader(leader["epoch"] + 1))["leader"] == "old-2"
        assert {job["job"] for job in (await acme.api("ls", {}))["data"]["jobs"]} == {"a", "b"}

        # all are new: then, and on the word that they are two, the level is raised
        new = [await next_release(made, name) for name in ("new-1", "new-2")]
        await until(lambda: all("folded" in each.words() for each in new), what="the new release standing by")
        assert await old[1].terminate() == 0
        await heard(acme, "new-1", "new-2")
        refused = await acme.admin("feature-level", {"level": FORMAT + 1, "schedulers": 3})
        assert "only new-1, new-2 can" in refused["message"]
        raised = await acme.admin("feature-level", {"level": FORMAT + 1, "schedulers": 2})
        assert (raised["kind"], raised["changed"], raised["level"]) == ("done", True, FORMAT + 1)
        assert not (await acme.admin("feature-level", {"level": FORMAT + 1}))["changed"]
        refused = await acme.admin("feature-level", {"level": FORMAT})
        assert "never lowered" in refused["next"]
        assert (await acme.submit("a", gpu={"model": "none"}))["duplicate"]

        # the old release cannot follow: it stops, and says why
        late = await this_release(made, "late")
        assert await late.process.wait() != 0
        assert f"has format {FORMAT + 1}" in late.words()
        assert "use a newer release" in late.words()
        await new[0].kill()
        await new[1].kill()
        await next_release(made, "new-3")
        assert (await acme.leader(leader["epoch"] + 2))["feature_level"] == FORMAT + 1
