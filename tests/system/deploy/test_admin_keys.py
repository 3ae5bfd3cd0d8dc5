"""`moorage admin keys` on a running site: who has which key, who is connected by it, and by a key that is gone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest

from moorage.bus import issued_keys
from moorage.bus.embedded import find_binary
from moorage.bus.errors import PermissionRefused
from moorage.bus.server_users import RIGHTS
from moorage.cli.doctor.checks_keys import of_keys
from moorage.cli.fleet.nats_config import ACCOUNTS, write
from tests.sites import HOST, RunningSite, free_servers, running
from tests.system.cli.node import Ran, moorage
from tests.waiting import until


async def admin_keys(site: RunningSite, *words: str) -> Ran:
    return await moorage("admin", "keys", str(site.folder), *words)


async def rows(site: RunningSite) -> dict[str, dict[str, Any]]:
    ran = await admin_keys(site, "--json")
    assert ran.code in (0, 10), ran.err
    return {row["key"]: row for row in json.loads(ran.out)["keys"]}


@contextmanager
def leaf(site: RunningSite, folder: Path, port: int, key: str) -> Iterator[str]:
    """A server of a tenant's own site, which is a leaf node by this key; its URL."""
    [server] = free_servers(1)
    seed = (site.folder / "keys" / f"{key}.nk").read_text()
    remote = f'url: "tls://{HOST}:{port}", nkey: {seed}, tls {{ ca_file: "{site.folder}/tls/ca.pem" }}'
    file = folder / "leaf.conf"
    file.write_text(
        f'server_name: "site2"\nlisten: "{HOST}:{server.port}"\n'
        f'leafnodes {{ reconnect: "100ms", remotes: [ {{ {remote} }} ] }}\n'
    )
    with (folder / "leaf.log").open("wb") as log:
        process = subprocess.Popen([find_binary(), "-c", str(file)], stdout=log, stderr=log)
    try:
        yield f"nats://{HOST}:{server.port}"
    finally:
        process.terminate()
        process.wait()


async def test_a_revoked_key_goes_on_through_a_leaf_node_until_it_is_cut(tmp_path: Path) -> None:
    [port] = [each.port for each in free_servers(1)]
    async with running(leaf_port=port, tls="only") as site:
        configuration = (site.folder / "server.conf").read_text()
        config = {"XDG_CONFIG_HOME": str(site.folder)}
        with leaf(site, tmp_path, port, "submitter.acme") as url:
            log = tmp_path / "leaf.log"
            await until(lambda: "Leafnode connection created" in log.read_text(), what="the leaf node is connected")
            async with await site.connect("operator.ana"):
                found = await rows(site)
                assert found["submitter.acme"]["where"] == ["leaf node site2 from 127.0.0.1"]
                assert found["submitter.acme"]["plain"] == 0, "a leaf node with TLS"
                assert (found["operator.ana"]["person"], found["operator.ana"]["connected"]) == ("ana", 1)
                assert found["worker.w1"]["seen_ms"] == found["worker.w1"]["connected"] == 0
                assert all(row["since_ms"] > 0 for row in found.values())
            await until(lambda: _no_longer(site), what="the operator has left")
            assert (await rows(site))["operator.ana"]["seen_ms"] > found["operator.ana"]["since_ms"]

            (site.folder / "keys/submitter.acme.nk").unlink()
            write(site.site, site.folder)
            (site.folder / "server.conf").write_text(configuration)
            await site.reload()
            ran = await admin_keys(site)
            assert ran.code == 10, ran.err
            assert "keys that are gone: submitter.acme; to end them: --cut" in ran.err
            assert "REVOKED" in next(line for line in ran.out.splitlines() if line.startswith("submitter.acme\t"))
            checks = [check async for check in of_keys(config)]
            assert [check.verdict for check in checks] == ["warn"]
            assert f"moorage admin keys {site.folder} --cut" in checks[0].fix

            ran = await admin_keys(site, "--cut")
            assert ran.code == 0, ran.err + ran.out
            assert "ended: submitter.acme, leaf node site2 from 127.0.0.1" in ran.err
            await until(lambda: "Authorization Violation" in log.read_text(), what="the leaf node is refused")
            assert not any("leaf" in where for row in (await rows(site)).values() for where in row["where"])
            assert [check.verdict async for check in of_keys(config)] == ["ok"]
            connection = await nats.connect(url)  # of a client behind the leaf node
            with pytest.raises(nats.errors.Error):
                await connection.request("moorage.api.acme.ls", b"{}", timeout=1)
            await connection.close()
        log.unlink()
        with leaf(site, tmp_path, port, "submitter.acme"):
            await until(lambda: "Leafnode connection created" in log.read_text(), what="the new key of the leaf holds")
            await until(lambda: _leaf_of(site, "submitter.acme"), what="and is known by its name")


async def _no_longer(site: RunningSite) -> bool:
    return bool((await rows(site))["operator.ana"]["connected"] == 0)


async def _leaf_of(site: RunningSite, key: str) -> bool:
    row = (await rows(site)).get(key)
    return row is not None and not row["revoked"] and "leaf node" in str(row["where"])


async def test_the_key_of_the_folder_may_see_and_end_connections_and_nothing_else() -> None:
    async with running() as site:
        refused: list[str] = []

        def on_error(error: Exception) -> None:
            refused.append(str(error))

        async with await site.connect("system.main", on_error=on_error) as system:
            for subject in ("$SYS.REQ.SERVER.PING.CONNZ", "moorage.servers.PING.JSZ", "$SYS.REQ.SERVER.PING.JSZ",
                            "$SYS.REQ.SERVER.PING.VARZ", "$SYS.REQ.ACCOUNT.X.INFO",
                            "$JS.API.STREAM.LIST", "moorage.api.acme.submit", "_INBOX.operator.ana.x"):  # fmt: skip
                before = len(refused)
                await system.publish(subject, b"{}", "", {})
                await system.flush()
                await until(lambda n=before: len(refused) > n, what=f"{subject} is refused")
            for subject in ("$SYS.>", "$SYS.ACCOUNT.>", ">", "_INBOX.>", "moorage.>"):
                with pytest.raises(PermissionRefused):
                    await system.subscribe(subject, lambda _: None)
        for key in ("operator.ana", "submitter.acme", "worker.w1", "service.acme", "observer.graf"):
            refused.clear()
            async with await site.connect(key, on_error=on_error) as other:
                for subject in RIGHTS.publish:
                    await other.publish(subject.replace("*", "PING"), b"{}", "", {})
                await until(lambda: len(refused) == len(RIGHTS.publish), what=f"{key} is refused")


async def test_a_site_of_an_earlier_release_gets_it_by_a_reload_and_its_old_keys_keep_their_names() -> None:
    async with running() as site:
        accounts = (site.folder / ACCOUNTS).read_text()
        (site.folder / issued_keys.FILE).unlink()
        head, found, _ = accounts.partition('  "MOORAGE_SYSTEM" {')
        assert found
        (site.folder / ACCOUNTS).write_text(head + "}\n")
        await site.reload()
        async with await site.connect("submitter.acme") as connected:
            (site.folder / "keys/submitter.beta.nk").unlink()
            write(site.site, site.folder)
            await site.reload()
            ran = await admin_keys(site)  # nobody takes what a new account asks until the second one, as for a tenant
            assert (ran.code, "1 server did not answer" in ran.err) == (0, True), ran.err
            await site.reload()
            await connected.flush()
            assert (await rows(site))["submitter.acme"]["connected"] == 1
        issued = msgspec.json.decode((site.folder / issued_keys.FILE).read_bytes(), type=dict[str, issued_keys.Issued])
        of_beta = [each for each in issued.values() if each.key == "submitter.beta"]
        assert sorted(each.is_valid for each in of_beta) == [False, True]


async def test_each_of_three_servers_is_asked_and_one_that_is_away_is_told() -> None:
    async with running(servers=3) as site:
        async with await site.connect("operator.ana"):
            assert (await rows(site))["operator.ana"]["connected"] == 1
        site.processes[2].kill()
        site.processes[2].wait()
        ran = await admin_keys(site)
        assert (ran.code, "1 server did not answer" in ran.err) == (0, True), ran.err


async def test_what_is_no_folder_of_a_site_is_said(tmp_path: Path) -> None:
    ran = await moorage("admin", "keys", str(tmp_path))
    assert (ran.code, "is no folder of nats-config" in ran.err) == (1, True), ran.err


async def test_a_site_goes_over_to_passwords_and_back_by_reloads(tmp_path: Path) -> None:
    """Users who show passwords have no key of the servers' own, and a server went down at the second such reload."""
    async with running() as site:
        for auth in ("env", "nkey"):
            write(msgspec.structs.replace(site.site, auth=auth), site.folder)
            for _ in range(3):
                await site.reload()
        async with await site.connect("submitter.acme") as back:
            assert back.is_connected
