"""New machines get keys of a pool by a join token: as often and as long as it says, and with the rights of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.contexts import load_context
from moorage.bus.errors import PermissionRefused
from moorage.bus.join_tokens import JoinToken, new_key, public_of, read_token
from moorage.bus.transport import Delivery
from moorage.schemas.joining import JoinAsk
from moorage.schemas.subjects import Subjects
from tests.jwt_sites import running_jwt
from tests.leftover import ends_with_the_test
from tests.sites import RunningSite, running, settled
from tests.system.cli.node import COMMAND, Ran, environment, moorage
from tests.system.deploy.test_queue_of_tenants import leads
from tests.waiting import until

SUBJECTS: Final = Subjects()
POOLS: Final = {"spot": 3}
#: a machine that is refused ends within this time
ENDS_S: Final = 90


@contextlib.asynccontextmanager
async def joiner(site: RunningSite, *more: str) -> AsyncIterator[Path]:
    """`moorage admin joiner` on the site, and its log."""
    log = site.folder / "joiner.log"
    with log.open("wb") as out:
        words = ("admin", "joiner", str(site.folder), *more)
        process = ends_with_the_test(
            await asyncio.create_subprocess_exec(
                *COMMAND, *words, env=environment(**site.environment), stdout=out, stderr=out
            )
        )
    try:
        await until(lambda: "answers machines" in log.read_text(), what="the joiner")
        yield log
        assert process.returncode is None, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def token(site: RunningSite, *more: str, pool: str = "spot") -> tuple[Path, str]:
    """A new token, as a private file, and its name."""
    made = await moorage("admin", "token", str(site.folder), f"pool={pool}", *more, env=site.environment)
    assert made.code == 0, made.err
    file = site.folder / f"{len(list(site.folder.glob('*.token')))}.token"
    file.write_text(made.out)
    file.chmod(0o600)
    return file, made.err.split()[1]


@contextlib.asynccontextmanager
async def machine(
    tmp_path: Path, name: str, file: Path, simulate: str = "1x2xT4"
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """A worker on a new machine, which has the token alone, and its log."""
    log = tmp_path / f"{name}.log"
    words = ("worker", "--join", str(file), "--simulate", simulate, "--state", str(tmp_path / name))
    with log.open("ab") as out:
        process = ends_with_the_test(
            await asyncio.create_subprocess_exec(
                *COMMAND, *words, env=environment(XDG_CONFIG_HOME=str(tmp_path / "none")), stdout=out, stderr=out
            )
        )
    try:
        yield process, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def listed(site: RunningSite) -> dict[str, dict[str, Any]]:
    found = await moorage("fleet", "--nats", "operator.ana", "--json", env=site.environment)
    return {row["worker"]: row for row in (found.frame["data"]["workers"] if found.code == 0 else [])}


async def ran(site: RunningSite, *words: str) -> Ran:
    return await moorage(*words, env=site.environment)


@pytest.mark.slow
async def test_machines_join_by_a_token_as_often_as_it_says_and_each_use_is_recorded(tmp_path: Path) -> None:
    async with running(pools=POOLS) as site, leads(site), joiner(site) as log:
        file, name = await token(site, "--uses", "2", "--gpus", "2")
        async with contextlib.AsyncExitStack() as machines:
            for each in ("a", "b"):
                await machines.enter_async_context(machine(tmp_path, each, file))

            async def both() -> bool:
                return {name: row["state"] for name, row in (await listed(site)).items()} == {
                    "spot-1": "up", "spot-2": "up",
                }  # fmt: skip

            await until(both, what="both have joined")
            assert {row["labels"]["pool"] for row in (await listed(site)).values()} == {"spot"}
            third, told = await machines.enter_async_context(machine(tmp_path, "c", file))
            assert await asyncio.wait_for(third.wait(), ENDS_S) != 0
            assert f"the join token {name} is used up" in told.read_text()
            # another kind of machine, a token that is revoked, one that others may read
            other, id_of_other = await token(site, "--uses", "9", "--gpus", "2")
            wrong, told = await machines.enter_async_context(machine(tmp_path, "d", other, "1x4xT4"))
            assert await asyncio.wait_for(wrong.wait(), ENDS_S) != 0
            assert "a machine of another kind" in told.read_text()
            assert (await ran(site, "admin", "token", str(site.folder), "--revoke", id_of_other)).code == 0
            late, told = await machines.enter_async_context(machine(tmp_path, "e", other))
            assert await asyncio.wait_for(late.wait(), ENDS_S) != 0
            assert f"the join token {id_of_other} is revoked" in told.read_text()
            other.chmod(0o644)
            open_to_all, told = await machines.enter_async_context(machine(tmp_path, "f", other))
            assert await asyncio.wait_for(open_to_all.wait(), ENDS_S) != 0
            assert "others than its owner may read the join token" in told.read_text()
        acts = await ran(site, "admin", "acts", "--nats", "operator.ana", "--verb", "admit", "--json")
        rows = [(row["by"], row["worker"], row["why"].split(",")[0]) for row in acts.frame["data"]["acts"]]
        assert rows == [
            ("operator:joiner", "spot-1", f"token {name} of pool spot"),
            ("operator:joiner", "spot-2", f"token {name} of pool spot"),
        ]
        tokens = (await ran(site, "admin", "token", str(site.folder), "--json")).frame["tokens"]
        assert [(row["state"], row["used"], row["workers"]) for row in tokens] == [
            ("used up", 2, ["spot-1", "spot-2"]), ("revoked", 0, []),
        ]  # fmt: skip
        # a machine that is started again has its key
        async with machine(tmp_path, "a", tmp_path / "no-such-file"):
            own = (tmp_path / "a/joined/worker.id").read_text()
            await until(lambda: _is_up(site, own), what="it joins again, without its token")
        secrets = [read_token(file.read_bytes(), "").seed, read_token(file.read_bytes(), "").nkey]
        secrets += [(site.folder / f"keys/worker.spot-{at}.nk").read_text().strip() for at in (1, 2)]
        logs = [log, *tmp_path.glob("*.log"), site.folder / "tokens.json", *site.folder.glob("server*.log")]
        assert not [each for each in logs for secret in secrets if secret in each.read_text()]


async def _is_up(site: RunningSite, name: str) -> bool:
    return (await listed(site)).get(name, {}).get("state") == "up"


@pytest.mark.slow
async def test_a_site_of_jwts_signs_keys_of_a_worker_of_that_pool_alone(tmp_path: Path) -> None:
    async with running_jwt(pools={"spot": 1}, shared=True) as site, leads(site):
        key = str(site.folder / "MOORAGE.seed")
        signing = ("--nats", "joiner.main", "--signing-key", key)
        async with joiner(site, *signing):
            file, _ = await token(site, "--uses", "2", *signing)
            async with machine(tmp_path, "a", file), machine(tmp_path, "b", file):
                await until(lambda: _is_up(site, "spot-1"), what="the first machine")
                await until(lambda: _is_up(site, "spot-2"), what="the second machine")
            for each in "ab":
                folder = tmp_path / each / "joined"
                own = (folder / "worker.id").read_text()
                other = {"spot-1": "spot-2", "spot-2": "spot-1"}[own]
                context = load_context("worker", {"XDG_CONFIG_HOME": str(folder)})
                async with await connect(context, "a thief") as thief:
                    for refused in (
                        SUBJECTS.admin("fleet"),
                        SUBJECTS.api("acme", "ls"),
                        f"moorage.worker.{other}.join",
                    ):
                        with pytest.raises(PermissionRefused):
                            await thief.request(refused, b"{}", 5.0)


@pytest.mark.slow
async def test_who_has_a_token_can_ask_for_its_pool_and_do_no_more() -> None:
    async with running(pools={"spot": 3, "rest": 1}) as site, leads(site), joiner(site):
        file, name = await token(site, "--uses", "1")
        held = read_token(file.read_bytes(), "the test")
        async with await site.connect("pool.spot") as thief:
            for refused in (
                SUBJECTS.join("rest"), SUBJECTS.admin("admit", "joiner"), SUBJECTS.admin("fleet"),
                SUBJECTS.api("acme", "ls"), "moorage.worker.spot-1.join", "_INBOX.pool.spot.x",
            ):  # fmt: skip
                with pytest.raises(PermissionRefused):
                    await thief.request(refused, b"{}", 5.0)
            for heard in (SUBJECTS.join("spot"), SUBJECTS.join("*"), "moorage.>", "_INBOX.pool.rest.>"):
                with pytest.raises(PermissionRefused):
                    await (await thief.subscribe(heard, lambda _: None)).unsubscribe()
            # asks that no token's owner has signed
            good = _ask(held)
            unsigned = msgspec.structs.replace(good, signature="")
            changed = msgspec.structs.replace(good, gpus=99)
            foreign = msgspec.structs.replace(_ask(msgspec.structs.replace(held, seed=new_key()[0])), token=good.token)
            for ask in (unsigned, changed, foreign, msgspec.structs.replace(good, token="U" * 56)):
                answer = await thief.request(SUBJECTS.join("spot"), msgspec.json.encode(ask), 5.0)
                assert json.loads(answer.data)["code"] == "not-permitted"
            for junk in (b"", b"{}", b"[1]", b"\xff" * 999):
                assert json.loads((await thief.request(SUBJECTS.join("spot"), junk, 5.0)).data)["kind"] == "error"
        tokens = (await ran(site, "admin", "token", str(site.folder), "--json")).frame["tokens"]
        assert [(row["token"], row["used"]) for row in tokens] == [(name, 0)]
        # the joiner's own key gives its one order, and hears what machines ask
        async with await site.connect("joiner.main") as own:
            for refused in (SUBJECTS.admin("drain", "joiner"), SUBJECTS.admin("admit"), SUBJECTS.api("acme", "ls")):
                with pytest.raises(PermissionRefused):
                    await own.request(refused, b"{}", 5.0)


def _ask(held: JoinToken) -> JoinAsk:
    import base64

    from moorage.bus.join_tokens import sign

    ask = JoinAsk(token=public_of(held.seed), public=new_key()[1], seal=base64.b64encode(bytes(32)).decode(), gpus=2)
    return msgspec.structs.replace(ask, signature=base64.b64encode(sign(held.seed, ask.signed)).decode())


@pytest.mark.slow
async def test_nothing_is_given_while_no_leader_can_record_it(tmp_path: Path) -> None:
    async with running(pools=POOLS) as site, joiner(site) as log:
        file, _ = await token(site)
        async with machine(tmp_path, "a", file) as (process, _):
            await until(lambda: "refused" in log.read_text(), what="it is refused")
            assert process.returncode != 0
            tokens = (await ran(site, "admin", "token", str(site.folder), "--json")).frame["tokens"]
            assert [row["used"] for row in tokens] == [0]
            assert not (tmp_path / "a/joined/worker.id").exists()


async def test_a_token_that_goes_into_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    async with running(pools=POOLS) as site:
        with (tmp_path / "spot.token").open("wb") as file:
            process = ends_with_the_test(
                await asyncio.create_subprocess_exec(
                    *COMMAND, "admin", "token", str(site.folder), "pool=spot", env=environment(), stdout=file
                )
            )
            assert await process.wait() == 0
        assert (tmp_path / "spot.token").stat().st_mode & 0o777 == 0o600
        assert os.stat(site.folder / "tokens.json").st_mode & 0o777 == 0o600
        for line in (
            ["pool=rest"],
            ["spot"],
            ["pool=spot", "--uses", "0"],
            ["pool=spot", "--until", "never"],
            ["--uses", "2"],
        ):
            refused = await ran(site, "admin", "token", str(site.folder), *line)
            assert (refused.code != 0, refused.out) == (True, ""), line


@pytest.mark.slow
async def test_no_answer_to_a_machine_is_an_order_or_comes_to_another_pool() -> None:
    """Whatever reply subject it names: the joiner may publish its one order, and in the inbox of each pool."""
    replies = (SUBJECTS.admin("admit", "joiner"), "_INBOX.pool.other.x", "_INBOX.joiner.main.x")
    async with (
        running(pools={"spot": 1, "other": 1}) as site,
        joiner(site),
        await site.witness("MOORAGE") as users,
        await site.connect("pool.spot") as spot,
    ):
        heard: list[Delivery] = []
        for reply in replies:
            await users.subscribe(reply, heard.append)
        await settled(users)
        await spot.send([(SUBJECTS.join("spot"), b"{}", reply) for reply in replies])
        answer = await spot.request(SUBJECTS.join("spot"), b"{}", 10.0)  # behind all of these
        assert b"invalid-argument" in answer.data
        await settled(users)
        assert heard == []
