"""A site with TLS: what goes over the network, how a running one goes over to it, and what is told before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import nats
import pytest
from cryptography import x509

from moorage.bus import certificates
from moorage.bus.certificate_ends import AUTHORITY, DAY_S, OWN, certificate_ends
from moorage.bus.connection import connect
from moorage.bus.contexts import Context
from moorage.bus.errors import BadContext, BusError, CannotConnect
from moorage.cli.doctor.checks_tls import of_site_certificates, of_tls
from moorage.schemas.errors import MoorageError
from tests.sites import HOST, RunningSite, running
from tests.system.cli.node import Ran, moorage
from tests.system.deploy.test_roles_live import everybody
from tests.waiting import until

WAIT_S: Final = 90.0
#: what TLS says of an authority that this machine does not trust
UNKNOWN: Final = "issuer certificate|self-signed"
#: with which `running` and `everybody` make a site by themselves
NAMES: Final = ("--tenant", "acme", "--tenant", "beta", "--worker", "w1", "--worker", "w2", "--operator", "ana",
                "--observer", "graf")  # fmt: skip


async def nats_config(site: RunningSite, *more: str) -> Ran:
    servers = [word for each in site.site.servers for word in ("--server", each.reached())]
    ran = await moorage("admin", "nats-config", "--out", str(site.folder), *NAMES, *servers, *more)
    assert ran.code == 0, ran.err
    return ran


def plain(site: RunningSite, key: str, at: int = 0) -> Context:
    """The context of a user from before TLS, at one server."""
    return Context(
        url=f"nats://{site.site.servers[at].reached()}", nkey=str(site.folder / f"keys/{key}.nk"),
        inbox_prefix=f"_INBOX.{key}", source="test",
    )  # fmt: skip


async def handshake(host: str, port: int, tls: ssl.SSLContext) -> str:
    """The version of TLS that this port speaks. Raises OSError."""
    _, writer = await asyncio.open_connection(host, port, ssl=tls)
    version: str = writer.get_extra_info("ssl_object").version()
    writer.transport.abort()
    return version


async def heals(site: RunningSite, key: str = "ledger.main") -> None:
    """Until the servers elect a leader of JetStream again, for users with the contexts of now."""

    async def answers() -> bool:
        with contextlib.suppress(BusError, CannotConnect):
            async with await site.connect(key, give_up_after_s=1) as ledger:
                info = await ledger.request("$JS.API.INFO", b"", 2.0)
                return b'"error"' not in info.data
        return False

    await until(answers, WAIT_S, "JetStream answers")


async def test_nothing_of_a_client_or_a_route_goes_over_the_network_in_the_open() -> None:
    async with running(servers=3, tls="only") as site:
        context = site.context("submitter.acme")
        tls = context.tls()
        assert tls is not None
        assert context.url.startswith("tls://")
        async with await site.connect("submitter.acme") as acme:
            await acme.flush()
        with pytest.raises(BadContext, match=UNKNOWN):
            await connect(plain(site, "submitter.acme"), "in the open", give_up_after_s=0.1)
        with pytest.raises(BadContext, match=UNKNOWN):
            await connect(Context(url=context.url), "trusts the machine's", give_up_after_s=0.1)
        for server in site.site.servers:
            assert await handshake(HOST, server.port, tls) in ("TLSv1.2", "TLSv1.3")
            text = (site.folder / f"server-{site.site.servers.index(server) + 1}.conf").read_text()
            assert f'client_advertise: "{server.reached()}"' in text, "others are told of by names of certificates"


async def test_a_server_with_a_route_in_the_open_is_refused() -> None:
    async with running(servers=3, tls="only", started=2) as site:
        file = site.folder / "server-3.conf"
        head, _, tail = file.read_text().partition("  tls {\n")
        file.write_text(head + tail.partition("  }\n")[2])
        site.start(2)
        log = site.folder / "server-0.log"
        await until(lambda: "TLS route handshake error" in log.read_text(), what="the route is refused")


@pytest.mark.long
@pytest.mark.slow
async def test_a_running_fleet_goes_over_in_two_steps_and_loses_no_job(tmp_path: Path) -> None:
    async with everybody(servers=3) as made, contextlib.AsyncExitStack() as open_ones:
        site, go = made.site, tmp_path / "go"
        acme = await open_ones.enter_async_context(made.client("submitter.acme"))
        long = await acme.submit(["sh", "-c", f"until [ -e {go} ]; do sleep 0.1; done"], job="long", gpu="1xT4")
        await until(lambda: _is_running(long), WAIT_S, "the long job runs")
        jobs: list[Any] = []
        over = asyncio.Event()

        async def submits() -> None:
            while not over.is_set():
                jobs.append(await acme.submit(["true"], job=f"short-{len(jobs)}", gpu="1xT4"))
                await jobs[-1].result(wait=WAIT_S)

        submitting = asyncio.create_task(submits())
        await until(lambda: len(jobs) > 1, WAIT_S, "jobs run before")

        ran = await nats_config(site, "--tls")
        steps = ran.err.partition("do this in this order:\n")[2]
        assert [line.strip()[:2] for line in steps.splitlines()[:4]] == ["1.", "2.", "3.", "4."], ran.err
        assert "stop all servers, then start them all" in steps
        for at in range(3):
            site.stop(at)
        for at in range(3):
            site.start(at)
        await heals(site)
        count = len(jobs)
        await until(lambda: len(jobs) > count + 1, WAIT_S, "jobs run with contexts from before")
        await made.restart("scheduler")
        await made.restart("worker")
        ran = await moorage("admin", "keys", str(site.folder))
        assert "connections without TLS: submitter.acme (" in ran.err, ran.err
        count = len(jobs)
        await until(lambda: len(jobs) > count + 1, WAIT_S, "jobs run with everybody's new context but one")
        over.set()
        await submitting
        await acme.close()
        acme = await open_ones.enter_async_context(made.client("submitter.acme"))

        async def all_encrypt() -> bool:
            ran = await moorage("admin", "keys", str(site.folder))
            return "without TLS" not in ran.err

        await until(all_encrypt, WAIT_S, "nobody comes without TLS")
        ran = await nats_config(site, "--tls-only")
        assert "restarted the servers, one after another" in ran.err
        for at in range(3):
            site.stop(at)
            site.start(at)
            await heals(site)
        with pytest.raises(BadContext, match=UNKNOWN):
            await connect(plain(site, "submitter.acme"), "in the open", give_up_after_s=0.1)
        go.touch()
        assert (await acme.job("long").result(wait=WAIT_S)).state == "SUCCEEDED"
        changes = [each.state for each in (await acme.job("long").show()).changes]
        assert changes.count("RUNNING") == 1, changes
        for job in jobs:
            shown = await acme.job(job.job).show()
            assert shown.state == "SUCCEEDED", shown
        told = (await moorage("metrics", "--nats", "operator.ana", env=site.environment)).out
        for server in site.site.servers:
            assert f'moorage_certificate_end_timestamp_seconds{{certificate="{server.reached()}"}} 1.8' in told, told
        assert "do this in this order" not in (await nats_config(site)).err, "a site stays as it is"


async def _is_running(job: Any) -> bool:
    return bool((await job.show()).state == "RUNNING")


async def test_the_end_of_each_certificate_is_told_and_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(servers=3, auth="mtls") as site:
        context = site.context("operator.ana")
        ends = await certificate_ends(context)
        assert ends.keys() == {*(each.reached() for each in site.site.servers), AUTHORITY, OWN}
        now = datetime.now(UTC).timestamp()
        assert {round((each - now) / DAY_S) for name, each in ends.items() if name != AUTHORITY} == {825}
        assert round((ends[AUTHORITY] - now) / DAY_S) == 3650
        [check] = [check async for check in of_tls(context)]
        assert (check.verdict, "certificates of 3 servers" in check.found) == ("ok", True)
        [check] = [check async for check in of_site_certificates(site.environment)]
        assert check.verdict == "ok"
        monkeypatch.setattr(certificates, "VALID_DAYS", 29)
        certificates.renew(site.folder / "tls", every=True)
        [check] = [check async for check in of_site_certificates(site.environment)]
        assert check.verdict == "warn"
        assert check.fix == f"moorage admin renew {site.folder}"
        await site.reload()
        [check] = [check async for check in of_tls(context)]
        assert check.verdict == "warn"
        assert "in 28 days" in check.found
        assert "moorage admin renew" in check.fix


async def test_a_renewed_certificate_holds_after_a_reload_and_nobody_needs_another_file() -> None:
    async with running(servers=3, tls="only") as site:
        tls = site.folder / "tls"
        before = {file.name: file.read_bytes() for file in tls.iterdir()}
        ran = await moorage("admin", "renew", str(site.folder))
        assert (ran.code, "0 certificates renewed" in ran.err) == (0, True), ran.err
        async with await site.connect("submitter.acme") as acme:
            ran = await moorage("admin", "renew", str(site.folder), "--all")
            assert (ran.code, "3 certificates renewed" in ran.err) == (0, True), ran.err
            assert {name for name, was in before.items() if (tls / name).read_bytes() == was} == {"ca.pem", "ca.key"}
            await site.reload()
            await acme.flush()
        async with await site.connect("submitter.acme") as acme:
            await acme.flush()
            peer = acme.context.tls()
            assert peer is not None
        served = ssl.get_server_certificate((HOST, site.site.servers[0].port))
        assert served.strip() == (tls / "server.1.pem").read_text().strip()


def test_an_authority_that_ends_before_what_it_signs_is_made_anew_and_both_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moorage.bus.site import Server, Site

    site = Site(tenants=("acme",), servers=(Server("h1"),), tls="only")
    with monkeypatch.context() as short:
        short.setattr(certificates, "AUTHORITY_DAYS", 40)
        certificates.certificates(tmp_path, site)
    old = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    [server] = [each for each in certificates.ends(tmp_path) if each.name == "server.1"]
    assert server.at_s <= old.not_valid_after_utc.timestamp(), "no certificate outlives its authority"
    new = {each.name for each in certificates.renew(tmp_path)}
    assert new == {"ca", "server.1"}
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    assert authority.not_valid_after_utc > datetime.now(UTC) + timedelta(days=3600)
    renewed = x509.load_pem_x509_certificate((tmp_path / "server.1.pem").read_bytes())
    renewed.verify_directly_issued_by(old)
    renewed.verify_directly_issued_by(authority)
    assert certificates.renew(tmp_path) == []
    (tmp_path / "ca.key").unlink()
    assert certificates.renew(tmp_path) == [], "nothing ends soon"
    with pytest.raises(MoorageError, match="no authority that could sign"):
        certificates.renew(tmp_path, every=True)


async def test_a_client_that_waits_for_the_servers_first_line_encrypts_too() -> None:
    """As clients in other languages do."""
    async with running(tls="only") as site:
        context = site.context("submitter.acme")
        connection = await nats.connect(
            context.url,
            tls=context.tls(),
            nkeys_seed=context.nkey,
            inbox_prefix=b"_INBOX.submitter.acme",
        )
        await connection.flush()
        await connection.close()
