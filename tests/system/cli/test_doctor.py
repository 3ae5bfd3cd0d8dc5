"""The doctor: what is sound is told as sound, and what is not with what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.msg import Msg

from moorage.bus.connection import connect
from moorage.bus.contexts import Context
from moorage.bus.embedded import find_binary
from moorage.cli.doctor import bundle, checks_fleet, checks_host, checks_nats
from moorage.client import AsyncClient, FleetInfo
from moorage.client.errors import NoScheduler, NotPermitted, Rejected
from moorage.client.fleet import AsyncFleet
from moorage.client.view.checks import Check
from moorage.schemas.errors import Problem
from moorage.system.build import build
from moorage.worker.supervisor import launcher_client
from tests.disk import TINY_MIB, fill, mount_small, unmount
from tests.leftover import ends_with_the_test
from tests.nvidia.stub import Board, Stub
from tests.podmans import podman_home, why_no_podman
from tests.system.bus.test_encrypted import speaking_first
from tests.system.cli.node import Node, moorage
from tests.waiting import until


async def test_the_doctor_finds_a_node_sound(node: Node, unique: str) -> None:
    ran = await node.run("doctor", "--json", tenant=unique)
    assert ran.code == 0, ran.out
    found = {frame["name"]: frame for frame in ran.frames}
    assert {frame["kind"] for frame in ran.frames} == {"check"}
    for name in (
        "python",
        "context",
        "nats",
        "user",
        "clock",
        "jetstream",
        "sync",
        "disk",
        "events",
        "submitter",
        "leader",
    ):
        assert found[name]["verdict"] == "ok", found[name]
    assert "epoch" in found["leader"]["found"]
    assert "simulated" in found["workers"]["found"]
    assert "sync_interval: always is set" in found["sync"]["found"]
    text = await node.run("doctor", tenant=unique)
    assert {row[0] for row in text.rows} <= {"ok", "warn", "fail"}
    assert "0 fail" in text.err


def test_the_doctor_finds_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    if not mount_small(folder, TINY_MIB):
        pytest.skip("no right to mount a file system of our own")
    try:
        fill(folder)
        check = checks_nats._disk(folder / "nats.conf")
    finally:
        unmount(folder)
    assert (check.verdict, check.found.startswith("0 of ")) == ("fail", True)
    assert "moorage up then accepts jobs again" in check.fix
    assert checks_nats._disk(tmp_path / "nats.conf").verdict == "ok"


@pytest.mark.parametrize(
    ("raised", "verdict", "found"),
    [
        (NotPermitted(Problem("permission-refused", "no")), "ok", "not shown the whole fleet"),
        (NoScheduler(Problem("no-responders", "none")), "ok", "not shown the whole fleet"),
        (TimeoutError(), "warn", "did not say within 3 s"),
        (Rejected(Problem("internal", "it broke")), "warn", "it broke"),
    ],
)
async def test_a_leader_that_does_not_show_the_fleet_is_no_missing_key(
    node: Node, unique: str, monkeypatch: pytest.MonkeyPatch, raised: Exception, verdict: str, found: str
) -> None:
    async def show(fleet: AsyncFleet) -> FleetInfo:
        raise raised

    monkeypatch.setattr(AsyncFleet, "show", show)
    async with AsyncClient(node.url, tenant=unique) as client:
        told = {check.name: check async for check in checks_fleet._of_operators(client, 7)}
    assert told["leader"].found.endswith("last ledger record 7")
    assert told["operator"].verdict == verdict
    assert found in told["operator"].found


@pytest.mark.slow
async def test_the_doctor_says_what_is_missing_and_what_to_do(nats_url: str) -> None:
    nobody = await moorage("doctor", "--nats", nats_url, "--timeout", "3s", "--tenant", "nobody-here")
    rows = {row[1]: row for row in nobody.rows}
    assert (nobody.code, rows["leader"][0]) == (1, "fail")
    assert "moorage scheduler" in rows["leader"][3]
    assert rows["jetstream"][0] == "ok"
    nowhere = await moorage("doctor", "--nats", "nats://me:hunter2@127.0.0.1:1", "--timeout", "200ms")
    rows = {row[1]: row for row in nowhere.rows}
    assert (nowhere.code, rows["nats"][0]) == (1, "fail")
    assert "moorage up" in rows["nats"][3]
    assert "hunter2" not in nowhere.out + nowhere.err
    wrong = await moorage("doctor", "--nats", "no-such-context")
    assert (wrong.code, {row[1]: row for row in wrong.rows}["context"][0]) == (1, "fail")


@pytest.mark.slow
async def test_the_doctor_says_what_has_the_port() -> None:
    """A server that is silent, and one of another protocol that speaks first."""

    for greeting in (b"", b"SSH-2.0-OpenSSH_9.6\r\n"):
        async with await asyncio.start_server(speaking_first(greeting), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            told = await moorage("doctor", "--nats", f"nats://127.0.0.1:{port}", "--timeout", "2s")
            rows = {row[1]: row for row in told.rows}
            assert (told.code, rows["nats"][0]) == (1, "fail")
            assert "did not greet as a NATS server" in rows["nats"][2]
            assert rows["nats"][3].startswith("see which process has that port: ss -ltnp")


async def test_the_doctor_tells_of_a_server_without_jetstream(tmp_path: Path) -> None:
    conf = tmp_path / "nats.conf"
    conf.write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: "{tmp_path}"\n')
    process = ends_with_the_test(
        await asyncio.create_subprocess_exec(find_binary(), "-c", str(conf), stderr=asyncio.subprocess.DEVNULL)
    )
    ports = tmp_path / f"nats-server_{process.pid}.ports"
    await until(lambda: ports.exists() and ports.read_text().endswith("}"), what="it listens")
    [url] = msgspec.json.decode(ports.read_bytes())["nats"]
    told = await moorage("doctor", "--nats", url, "--timeout", "3s")
    rows = {row[1]: row for row in told.rows}
    assert rows["jetstream"][0] == "fail"
    assert "it is off on this server" in rows["jetstream"][2]
    assert told.code == 1, "nobody leads there"
    ended = await moorage("scheduler", "--nats", url)
    assert "JetStream does not answer on $JS.API.STREAM.INFO" in ended.err, "no scheduler is missing: this is one"
    assert "fix: turn JetStream on" in ended.err


@pytest.mark.parametrize(
    ("code", "verdict", "says"),
    [(10008, "fail", "find the nats-servers of the cluster that do not run"), (10039, "fail", "jetstream: enabled")],
)
async def test_the_doctor_tells_a_cluster_without_a_quorum_from_jetstream_that_is_off(
    nats_url: str, unique: str, code: int, verdict: str, says: str
) -> None:
    """To turn on what is on would help nobody."""

    async def refuse(message: Msg) -> None:
        refusal = {"error": {"code": 503, "err_code": code, "description": "not now"}}
        await message.respond(msgspec.json.encode(refusal))

    async with await connect(nats_url, "test") as connection:
        server = await nats.connect(nats_url)
        await server.subscribe(f"{unique}.INFO", cb=refuse)
        await server.flush()

        async def answers() -> bool:
            with contextlib.suppress(nats.errors.NoRespondersError):
                return bool((await server.request(f"{unique}.INFO", b"", timeout=30)).data)
            return False

        await until(answers, 60, "the stand-in answers")  # once the server did not know of it yet
        check = await checks_nats._jetstream(connection, Context(url=nats_url, jetstream_api_prefix=unique))
        await server.close()
    assert (check.verdict, says in check.fix) == (verdict, True), check


async def test_the_doctor_tells_of_a_moorage_up_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text('{"url": "nats://127.0.0.1:1", "pid": 1, "started_ticks": 1}')
    told = await moorage("doctor", env={"MOORAGE_HOME": str(tmp_path)})
    rows = {row[1]: row for row in told.rows}
    assert (told.code, rows["context"][0]) == (1, "fail")
    assert "was killed" in rows["context"][2]
    assert (await moorage("ls", env={"MOORAGE_HOME": str(tmp_path)})).code == 2


async def test_the_doctor_refuses_flags_that_say_nothing(nats_url: str) -> None:
    assert (await moorage("doctor", "--nats", nats_url, "--timeout", "soon")).code == 2
    told = await moorage("doctor", "--nats", nats_url, "--timeout", "300ms", "--tenant", "Bad Tenant")
    assert "submitter's role" not in told.out


@pytest.mark.slow
async def test_the_doctor_looks_at_the_folder_of_secrets(tmp_path: Path, nats_url: str) -> None:
    folder, settings = tmp_path / "secrets", tmp_path / "moorage.toml"
    settings.write_text(f'[worker]\nsecrets_dir = "{folder}"\n')
    settings.chmod(0o600)

    async def found() -> list[str]:
        told = await moorage(
            "doctor", "--nats", nats_url, "--timeout", "300ms", env={"MOORAGE_SETTINGS": str(settings)}
        )
        return next(row for row in told.rows if row[1] == "secrets")

    assert (await found())[:3] == ["warn", "secrets", f"{folder} cannot be read: No such file or directory"]
    folder.mkdir(mode=0o700)
    assert (await found())[0] == "ok"
    (folder / "hf").write_text("hunter2")
    (folder / "hf").chmod(0o644)
    told = await found()
    assert (told[0], "chmod 600" in told[3], "hunter2" in "".join(told)) == ("warn", True, False)
    (folder / "hf").chmod(0o600)
    (folder / "..data").mkdir()
    assert (await found())[0] == "ok"
    settings.write_text(f'[worker]\nsecrets_dir = "{folder}"\nprograms_for = {{ vision = "/opt/*" }}\n')
    assert (await found())[2] == f"every tenant may use every secret in {folder}"
    settings.write_text(settings.read_text() + 'secrets_for = { vision = "vision-*" }\n')
    assert (await found())[0] == "ok"
    folder.chmod(0o770)
    assert "may be written to by others" in (await found())[2]


@pytest.mark.slow
async def test_the_doctor_says_where_the_limiter_cannot_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Stub(tmp_path / "stub", Board("GPU-11111111-2222-3333-4444-555555555555"))
    settings = tmp_path / "moorage.toml"
    settings.write_text("[worker]\n")
    settings.chmod(0o600)
    monkeypatch.setenv("MOORAGE_SETTINGS", str(settings))
    with stub.load():
        assert await checks_host.limiter() is None
        settings.write_text("[worker]\nlimiter = true\n")
        told = await checks_host.limiter()
        assert told is not None
        assert told.verdict == "ok"
        stub.boards[0].set(errors={"process_util": 3})
        told = await checks_host.limiter()
    assert told is not None
    assert (told.verdict, "GPU-11111111" in told.found, "constant rate" in told.fix) == ("warn", True, True)


async def test_the_doctor_says_whether_the_engine_of_a_driver_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "moorage.toml"
    monkeypatch.setenv("MOORAGE_SETTINGS", str(settings))
    settings.write_text('[worker]\ndrivers = ["process"]\n')
    assert await checks_host.engines() == [], "a driver without an engine needs none"
    own = f'[driver.podman]\nsocket = "{tmp_path}/podman.sock"\n'
    settings.write_text(f'[worker]\ndrivers = ["process", "podman"]\n{own}')
    (told,) = await checks_host.engines()
    assert (told.name, told.verdict) == ("engine", "fail")
    assert f"the engine of the driver podman does not answer at {tmp_path}/podman.sock" in told.found
    assert "systemctl --user enable --now podman.socket" in told.fix
    if why_no_podman():
        return
    with podman_home() as home:
        settings.write_text(f'[worker]\ndrivers = ["podman"]\n[driver.podman]\nsocket = "{home.socket}"\n')
        (told,) = await checks_host.engines()
        assert (told.verdict, told.found) == ("ok", f"podman answers at {home.socket}")


def test_the_doctor_says_whether_the_launcher_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc"):
        assert checks_host.launcher() == Check("launcher", "ok", "the compiled launcher starts jobs")
    monkeypatch.setattr(
        launcher_client.open_compiled, "__defaults__", (tmp_path / "launcher.bin", launcher_client.CONTRACT)
    )
    check = checks_host.launcher()
    assert (check.name, check.verdict) == ("launcher", "warn")
    assert "launcher.bin" in check.found
    assert "install gcc" in check.fix


async def test_a_bundle_has_versions_settings_checks_and_the_fleet_and_no_secret(
    node: Node, unique: str, tmp_path: Path
) -> None:
    planted = "planted-77e2-secret"
    (tmp_path / "moorage.toml").write_text('[worker]\nlabels = { note = "password=planted-77e2-secret" }\n')
    (tmp_path / "moorage.toml").chmod(0o600)
    env = {"MOORAGE_SETTINGS": str(tmp_path / "moorage.toml"), "MOORAGE_API_TOKEN": planted, "OTHER": planted}
    job = ("submit", "--env", f"KEY={planted}", "--gpu", "1xH100", "--", "sh", "-c", f"echo {planted}; sleep 1")
    assert (await node.run(*job, tenant=unique)).code == 0
    file = tmp_path / "bundle.json"
    ran = await moorage("doctor", "--bundle", str(file), "--json", env={**node.env(unique), **env})
    assert ran.code == 0, ran.err
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert planted not in text
    found = json.loads(text)
    assert found["build"] == build()
    assert found["host"]["packages"]["msgspec"]
    assert "MOORAGE_API_TOKEN" in found["host"]["variables"]
    assert {worker["release"] for worker in found["fleet"]["workers"]} == {build()}
    assert {check["name"] for check in found["checks"]} >= {"moorage", "nats", "leader", "workers"}
    values = {(row["section"], row["key"]): row for row in found["settings"]["values"]}
    assert values["worker", "labels"]["value"] == "note=password=***"
    assert ran.frame == {
        "kind": "bundle-written",
        "file": str(file),
        "checks": len(found["checks"]),
        "settings": len(values),
        "workers": len(found["fleet"]["workers"]),
    }
    again = await node.run("doctor", "--bundle", str(file), tenant=unique)
    assert (again.code, "it is there already" in again.err, file.read_text()) == (1, True, text)


async def test_a_bundle_is_written_where_no_server_answers(tmp_path: Path) -> None:
    file = tmp_path / "bundle.json"
    ran = await moorage("doctor", "--nats", "nats://ana:planted-secret@127.0.0.1:1", "--bundle", str(file))
    assert ran.code == 0, ran.err
    assert "planted-secret" not in file.read_text()
    found = json.loads(file.read_text())
    assert found["fleet"]["error"]["code"] == "cannot-connect"
    assert any(check["verdict"] == "fail" for check in found["checks"])


FIVE = "-" * 5


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a nats://ana:s3cret@h:4222 b nats://tok@h tls://h:1", "a nats://***@h:4222 b nats://***@h tls://h:1"),
        ('"seed SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY".', '"seed ***".'),
        ("jwt eyJ0eXAiOiJKV1QifQ.eyJqdGkiOiJ4In0.c2ln-bmF0_dXJl, more", "jwt ***, more"),
        (rf"{FIVE}BEGIN PRIVATE KEY{FIVE}\nMIGH\n{FIVE}END PRIVATE KEY{FIVE}\nrest", r"***\nrest"),
        ("http://h/x?token=abc&a=1 password=x", "http://h/x?token=***&a=1 password=***"),
        ("keys UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4 tokens", None),
    ],
)
def test_what_looks_like_a_secret_is_cut_out_of_a_bundle(text: str, left: str | None) -> None:
    assert bundle.without_secrets(text) == (text if left is None else left)
