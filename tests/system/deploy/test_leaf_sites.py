"""Two places, one fleet: workers, callers and members behind a leaf node, and what goes on while its link is cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus.connection import connect
from moorage.bus.contexts import Context
from moorage.bus.site import Tls
from moorage.bus.transport import Delivery
from tests.leaf_links import LeafLink, leaf_node, link
from tests.leftover import ends_with_the_test
from tests.sites import RunningSite, running, settled
from tests.system.cli.node import COMMAND, Ran, environment, moorage
from tests.system.live.stack import BRIEF
from tests.waiting import until

ROLES: Final = ("submitter", "operator", "worker", "scheduler")
LEASE_S: Final = 25
SETTINGS: Final = "[scheduler]\n" + "".join(f"{key} = {value}\n" for key, value in BRIEF.items())
WHO: Final = "import os\ndef where(data):\n    return os.environ['MOORAGE_WORKER']\n"
#: says each 50 ms, on the clock of all processes here, that it lives
LIVES: Final = """
import os, time
while True:
    with open(os.environ["LIVES"], "a") as file:
        file.write(f"{os.environ['MOORAGE_ATTEMPT']} {time.monotonic()}\\n")
    time.sleep(0.05)
"""


class TwoPlaces:
    """A site with one worker, `near`, and another one, `far`, behind the leaf node of lyon."""

    def __init__(self, site: RunningSite, cable: LeafLink, folder: Path, lease_s: int) -> None:
        self.site = site
        self.link = cable
        self.folder = folder
        (folder / "settings.toml").write_text(f"{SETTINGS}lease_most = {lease_s}\n")

    async def run(self, *argv: str, far: bool = False) -> Ran:
        """A command of the tenant, or of the operator, at the site or behind the leaf node."""
        key = "operator.ana" if argv[0] in ("fleet", "doctor") else "submitter.acme"
        return await moorage(argv[0], "--nats", key, *argv[1:], env=self.env(far=far), cwd=self.folder)

    def env(self, *, far: bool = False) -> dict[str, str]:
        return {"XDG_CONFIG_HOME": str(self.site.folder / "leaf-lyon" if far else self.site.folder)}

    async def begin(self, *argv: str, far: bool = False, **more: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{argv[0]}-{argv[-1]}.log").open("ab") as log:
            return ends_with_the_test(
                await asyncio.create_subprocess_exec(
                    *COMMAND, *argv, stdout=log, stderr=log, env=environment(**self.env(far=far), **more)
                )
            )

    async def scheduler(self, name: str) -> asyncio.subprocess.Process:
        settings = str(self.folder / "settings.toml")
        argv = ("--nats", "scheduler.main", "--settings", settings, "--name", name)
        return await self.begin("scheduler", *argv, MOORAGE_LEDGER_URL="ledger.main")

    async def worker(self, name: str, *more: str, far: bool = False) -> None:
        state, secrets = str(self.folder / name), str(self.site.folder / "secrets")
        argv = ("--nats", f"worker.{name}", "--simulate", "1x2xT4", "--state", state, "--secrets", secrets, *more)
        await self.begin("worker", *argv, "--id", name, far=far)

    async def rows(self) -> dict[str, dict[str, Any]]:
        ran = await self.run("fleet", "--json")
        return {row["worker"]: row for row in ran.frame["data"]["workers"]} if ran.code == 0 else {}

    async def all_up(self) -> bool:
        rows = await self.rows()
        return [rows[name]["state"] for name in ("near", "far") if name in rows] == ["up", "up"]

    async def where_called(self, *, far: bool) -> str:
        ran = await self.run("call", "who", "x", far=far)
        assert ran.code == 0, ran.err
        return ran.out.strip()

    async def tries(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.run("show", job, "--json")).frame["data"]
        return found

    def lives(self, job: str) -> list[tuple[str, float]]:
        """When each attempt of a job lived, in the order in which they said so."""
        file = self.folder / f"{job}.lives"
        words = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(attempt, float(at)) for attempt, at in words]

    async def submit_lives(self, job: str, *more: str) -> None:
        file = f"LIVES={self.folder / job}.lives"
        ran = await self.run(
            "submit", "--job", job, "--gpu", "1xT4", "--env", file, *more, "--", "python3", "-c", LIVES
        )
        assert ran.code == 0, ran.err
        await until(lambda: self.lives(job), what=f"{job} runs")


@contextlib.asynccontextmanager
async def two_places(
    folder: Path, rules: str = "", lease_s: int = LEASE_S, tls: Tls = "off"
) -> AsyncIterator[TwoPlaces]:
    """With `rules`, the leaf node's server has these accounts in place of its own."""
    async with link() as cable:
        places: dict[str, Any] = {"leaves": {"lyon": cable.leaf}, "behind": {"far": "lyon"}}
        async with running(servers=(cable.hub,), workers=("near", "far"), tls=tls, **places) as site:
            if rules:
                (site.folder / "leaf-lyon" / "accounts.conf").write_text(rules)
            with leaf_node(cable, site.folder / "leaf-lyon") as log:
                await until(lambda: log.read_text().count("Leafnode connection created") > 2, what="the leaf node")
                yield TwoPlaces(site, cable, folder, lease_s)


@pytest.mark.long
@pytest.mark.slow
async def test_what_runs_behind_a_leaf_node_outlives_a_cut_of_its_link(tmp_path: Path) -> None:
    async with two_places(tmp_path) as places:
        (tmp_path / "who.py").write_text(WHO)
        leader = await places.scheduler("one")
        await places.worker("near")
        await places.worker("far", "--label", "site=lyon", "--lease-s", f"{LEASE_S}s", far=True)

        await until(places.all_up, what="both workers")
        assert {name: row["lease_s"] for name, row in (await places.rows()).items()} == {"near": 5.0, "far": LEASE_S}
        await places.scheduler("two")

        # a service with a member at each place: each caller is answered at its own
        serves = ("--replicas", "2", "--service", "who:4", "--restart", "always", "--ready", "call", "--with", "who.py")
        ran = await places.run("submit", "--job", "who", *serves, "--", "moorage", "serve", "who:where")
        assert ran.code == 0, ran.err

        async def both_ready() -> bool:
            return bool((await places.tries("who")).get("ready") == 2)

        await until(both_ready, what="a member at each place")
        for _ in range(3):
            assert (await places.where_called(far=True), await places.where_called(far=False)) == ("far", "near")

        await places.submit_lives("there", "--requires", "site=lyon")
        ran = await places.run(
            "run", "--job", "said", "--gpu", "1xT4", "--requires", "site=lyon", "--", "echo", "from lyon", far=True
        )
        assert (ran.code, ran.out.strip()) == (0, "from lyon")
        assert (await places.run("logs", "said")).out.strip() == "from lyon", "its worker answers through the leaf node"

        # cut for longer than the scheduler's lease, while its leader dies
        places.link.cut()
        assert await places.where_called(far=True) == "far", "answered without the hub"
        ran = await places.run("submit", "--timeout", "2s", "--", "true", far=True)
        assert "the link of leaf node lyon to the other servers is cut, or" in ran.err
        leader.kill()

        async def told() -> bool:
            ran = await places.run("fleet")
            return "site lyon: none of its workers is heard" in ran.err and "far" in ran.out

        await until(told, what="the hub's fleet says what is cut")
        assert await places.where_called(far=False) == "near"
        places.link.heal()
        await until(places.all_up, what="both workers again")
        assert {attempt for attempt, _ in places.lives("there")} == {"1"}
        assert (await places.run("submit", "--job", "after", "--", "true", far=True)).code == 0

        # and for longer than its own: it begins elsewhere, once it is gone there
        await places.submit_lives("full", "--gpu", "2xT4")
        await places.submit_lives("moves")
        await places.run("cancel", "full")
        places.link.cut()
        await until(lambda: {at for at, _ in places.lives("moves")} == {"1", "2"}, what="it begins at the other place")
        lives = places.lives("moves")
        last = max(at for attempt, at in lives if attempt == "1")
        assert last < min(at for attempt, at in lives if attempt == "2"), "never both"
        places.link.heal()
        await until(places.all_up, what="both workers once more")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("cut_s", "lease_s", "tls"), [(10, LEASE_S, "only"), (60, 90, "off")])
async def test_a_cut_that_is_shorter_than_its_workers_lease_ends_nothing_behind_a_leaf_node(
    tmp_path: Path, cut_s: int, lease_s: int, tls: Tls
) -> None:
    async with two_places(tmp_path, lease_s=lease_s, tls=tls) as places:
        assert ("tls {" in (places.site.folder / "leaf-lyon/server.conf").read_text()) == (tls == "only")
        (tmp_path / "who.py").write_text(WHO)
        await places.scheduler("one")
        await places.worker("near")
        await places.worker("far", "--label", "site=lyon", "--lease-s", f"{lease_s}s", far=True)
        await until(places.all_up, what="both workers")
        serves = ("--service", "who:4", "--restart", "always", "--ready", "call", "--with", "who.py")
        at_lyon = ("--requires", "site=lyon")
        ran = await places.run("submit", "--job", "who", *serves, *at_lyon, "--", "moorage", "serve", "who:where")
        assert ran.code == 0, ran.err

        async def is_ready() -> bool:
            return (await places.tries("who")).get("ready") == 1

        await until(is_ready, what="a member there")
        await places.submit_lives("there", *at_lyon)
        places.link.cut()
        cut_at = places.lives("there")[-1][1]
        assert await places.where_called(far=True) == "far"
        lived = f"it goes on for {cut_s} s"
        await until(lambda: places.lives("there")[-1][1] - cut_at >= cut_s, deadline_s=cut_s + 60, what=lived)
        assert await places.where_called(far=True) == "far"
        places.link.heal()
        await until(places.all_up, what="both workers again")
        ran = await places.run("run", "--job", "after", *at_lyon, "--", "echo", "after", far=True)
        assert (ran.code, ran.out) == (0, "after\n")
        assert {attempt for attempt, _ in places.lives("there")} == {"1"}
        assert {row["attempt"] for row in (await places.tries("who"))["replica_states"]} == {1}


FORBIDDEN: Final[dict[str, tuple[str, ...]]] = {
    "MOORAGE": (
        "moorage.worker.near.renew", "moorage.worker.far.wanted", "moorage.api.acme.submit", "moorage.admin.ana.drain",
        "moorage.request.acme.submit", "moorage.fleet.frame", "moorage.fleet.rollcall", "moorage.events.acme",
        "moorage.call.acme.who", "$JS.API.STREAM.INFO.MOORAGE_HISTORY", "$JS.API.STREAM.CREATE.x",
        "$JS.API.STREAM.MSG.GET.OBJ_MOORAGE_FILES_acme", "$O.MOORAGE_FILES_acme.C.x", "_INBOX.submitter.acme.x",
        "_INBOX.worker.near.x", "_INBOX.operator.ana.x", "_R_.x",
    ),
    "MOORAGE_TENANT_acme": (
        "moorage.api.beta.submit", "moorage.api.acme.exec", "moorage.worker.far.renew", "moorage.call.beta.who",
        "moorage.admin.ana.drain", "$JS.API.STREAM.INFO.MOORAGE_HISTORY", "moorage.events.acme",
    ),
}  # fmt: skip
#: what each passes on, behind all that it may not, as the witnesses hear it
ALLOWED: Final = {"MOORAGE": "moorage.worker.far.renew", "MOORAGE_TENANT_acme": "moorage.api.acme.show"}


@pytest.mark.slow
async def test_the_keys_of_a_leaf_node_have_the_rights_of_those_behind_it_and_no_more(
    tmp_path: Path,
) -> None:
    """On a server with rules of its own, where each user may do everything."""
    rules = "".join(f'"{account}" {{ users: [ {{ user: "{account}", password: x }} ] }}\n' for account in FORBIDDEN)
    async with (
        two_places(tmp_path, f'accounts {{ {rules} "MOORAGE_TENANT_beta" {{}} }}') as places,
        contextlib.AsyncExitStack() as opened,
    ):
        heard: list[Delivery] = []
        for account in places.site.accounts:
            witness = await opened.enter_async_context(await places.site.witness(account))
            for subject in ("moorage.>", "$JS.>", "$O.>", "_R_.>", *(f"_INBOX.{role}.>" for role in ROLES)):
                await witness.subscribe(subject, heard.append)
            await settled(witness)
        for account, forbidden in FORBIDDEN.items():
            at = f"{places.link.leaf.host}:{places.link.leaf.port}"
            rogue = await connect(Context(url=f"nats://{account}:x@{at}", source="test"), "rogue")
            await opened.enter_async_context(rogue)
            await rogue.send([(subject, b"{}", "_INBOX.rogue.1") for subject in forbidden])
            await rogue.send([(ALLOWED[account], b"{}", "")])
        for subject in ALLOWED.values():
            await until(lambda subject=subject: subject in {each.subject for each in heard}, what=subject)
        assert {each.subject for each in heard} == {*ALLOWED.values()}
