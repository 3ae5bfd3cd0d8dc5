"""Keys of persons: what they do has their name, as far as nats-server proves it, and nothing else has one."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.connection import Connection
from moorage.cli.fleet.nats_config import write
from moorage.schemas.subjects import Subjects
from moorage.schemas.ways import STAMP
from tests.servers import ANSWER_S
from tests.sites import free_servers, running
from tests.system.cli.node import moorage
from tests.system.deploy.test_how_it_came import asks, body_of, leaf_of
from tests.system.deploy.test_queue_of_tenants import leads
from tests.system.deploy.test_roles_live import everybody
from tests.waiting import until

SUBJECTS: Final = Subjects()
SUBMIT: Final = SUBJECTS.api("acme", "submit")
PERSONS: Final = ("acme.lena", "acme.omar", "beta.lena")


async def shown(of: Connection, job: str, tenant: str = "acme") -> dict[str, Any]:
    answer = await asks(of, SUBJECTS.api(tenant, "show"), msgspec.json.encode({"job": job}))
    found: dict[str, Any] = answer["data"]
    return found


async def person_of(of: Connection, job: str) -> str | None:
    found: str | None = (await shown(of, job))["request"].get("person")
    return found


@pytest.mark.parametrize("of", [{}, {"auth": "env"}, {"auth": "mtls"}, {"servers": 3}], ids=str)
async def test_a_job_has_the_name_of_the_person_whose_key_submitted_it(of: dict[str, Any]) -> None:
    async with (
        running(persons=PERSONS, **of) as site,
        leads(site),
        await site.connect("submitter.acme.lena") as lena,
        await site.connect("submitter.acme.omar") as omar,
        await site.connect("submitter.acme") as acme,
    ):
        forged = {STAMP: '{"acc":"MOORAGE_TENANT_acme","user":"UFORGED"}'}
        for job, who in (("of-lena", lena), ("of-omar", omar), ("of-nobody", acme)):
            assert (await asks(who, SUBMIT, body_of(job), forged))["kind"] == "accepted"
        array = b"[" + b",".join(map(body_of, ("one", "two"))) + b"]"
        await asks(omar, SUBMIT, array)
        packed = msgspec.msgpack.encode(msgspec.json.decode(body_of("packed")))
        assert b"accepted" in (await lena.request(SUBMIT, packed, ANSWER_S)).data
        found = {job: await person_of(omar, job) for job in ("of-lena", "of-omar", "of-nobody", "one", "two", "packed")}
        assert found == {
            "of-lena": "lena", "of-omar": "omar", "of-nobody": None, "one": "omar", "two": "omar", "packed": "lena",
        }  # fmt: skip
        again = await asks(omar, SUBMIT, body_of("of-lena"))
        assert again["kind"] == "accepted", "the same request of another person is the same job"
        assert (await asks(omar, SUBJECTS.api("acme", "cancel"), b'{"job":"of-lena"}'))["kind"] != "error"
        changes = (await shown(lena, "of-lena"))["changes"]
        assert [each["by"] for each in changes if each["state"] in ("ACCEPTED", "CANCELLED")] == [
            "tenant:acme/lena", "tenant:acme/omar",
        ]  # fmt: skip


async def test_no_request_names_a_person_itself() -> None:
    async with running(persons=PERSONS) as site, leads(site):
        for key in ("submitter.acme", "submitter.acme.lena"):
            async with await site.connect(key) as who:
                for says in (b',"person":"omar"}', b', "\\u0070erson": "omar"}', b',"person":"omar","priority":3}'):
                    answer = await asks(who, SUBMIT, body_of("j")[:-1] + says)
                    assert (answer["code"], answer["field"]) == ("invalid-argument", "$.person"), answer


async def test_what_comes_through_a_leaf_node_or_the_queue_has_the_name_that_the_server_proves(tmp_path: Any) -> None:
    [port] = [each.port for each in free_servers(1)]
    async with (
        running(persons=PERSONS, leaf_port=port) as site,
        leads(site),
        leaf_of(site, port, "submitter.acme.lena", tmp_path) as behind,
        await site.connect("submitter.acme.omar") as omar,
    ):
        await until(lambda: _is_accepted(behind), ANSWER_S, "the leaf node's job is accepted")
        assert await person_of(omar, "leaf") == "lena", "the key of the leaf node: whoever is behind it"
        assert "error" not in await asks(omar, SUBJECTS.request("acme", "submit"), body_of("queued"))
        await until(lambda: _is_known(omar, "queued"), ANSWER_S, "the queued job is there")
        assert await person_of(omar, "queued") is None, "nats-server keeps no stamp in its queue"


async def _is_accepted(who: Connection) -> bool:
    try:
        return bool((await asks(who, SUBMIT, body_of("leaf")))["kind"] == "accepted")
    except Exception:  # the leaf is not connected yet
        return False


async def _is_known(who: Connection, job: str) -> bool:
    return "data" in await asks(who, SUBJECTS.api("acme", "show"), msgspec.json.encode({"job": job}))


async def test_a_person_who_is_added_to_a_running_site_is_known_without_a_restart() -> None:
    async with running() as site, leads(site):
        write(msgspec.structs.replace(site.site, persons=("acme.lena",)), site.folder)
        for _ in range(2):
            await site.reload()
        async with await site.connect("submitter.acme.lena") as lena:
            numbers = iter(range(1_000))

            async def is_named() -> bool:
                job = f"j{next(numbers)}"
                await asks(lena, SUBMIT, body_of(job))
                return await person_of(lena, job) == "lena"

            await until(is_named, 30.0, "the scheduler knows the person")


async def test_the_command_makes_keys_of_persons_and_shows_whose_they_are(tmp_path: Any) -> None:
    out = tmp_path / "site"
    words = ("admin", "nats-config", "--out", str(out), "--tenant", "vision", "--operator", "ana")
    ran = await moorage(*words, "--person", "vision/lena", "--person", "vision/omar")
    assert ran.code == 0, ran.err
    context = json.loads((out / "nats/context/submitter.vision.lena.json").read_text())
    assert (context["inbox_prefix"], context["nkey"]) == (
        "_INBOX.submitter.vision", str(out / "keys/submitter.vision.lena.nk"),
    )  # fmt: skip
    for wrong in ("lena", "vision.lena", "speech/lena", "vision/", "vision/a/b", "vision/a.b"):
        ran = await moorage(*words, "--person", wrong)
        assert (ran.code, "a person is TENANT/NAME" in ran.err) == (2, True), ran.err
    ran = await moorage(*words, "--person", "vision/lena", "--shared")
    assert (ran.code, "so it has no persons" in ran.err) == (2, True), ran.err


async def test_keys_has_the_persons() -> None:
    async with running(persons=PERSONS) as site, await site.connect("submitter.acme.lena"):
        ran = await moorage("admin", "keys", str(site.folder), "--json")
        rows = {row["key"]: row for row in json.loads(ran.out)["keys"]}
        assert (rows["submitter.acme.lena"]["person"], rows["submitter.acme.lena"]["connected"]) == ("lena", 1)
        assert (rows["submitter.acme"]["person"], rows["operator.ana"]["person"]) == ("", "ana")


@pytest.mark.slow
async def test_who_read_the_output_of_another_persons_job_or_ran_a_command_in_it_is_listed_and_exported() -> None:
    async with everybody(persons=("acme.lena", "acme.omar"), execs=("acme",)) as made:
        env = dict(made.site.environment)

        async def says(who: str, *words: str, code: int = 0) -> str:
            verb, *rest = words
            ran = await moorage(verb, "--nats", f"submitter.acme{who}", "--tenant", "acme", *rest, env=env)
            assert ran.code == code, ran.err
            return ran.out

        async def told(*words: str) -> dict[str, Any]:
            ran = await moorage("admin", "acts", "--json", "--nats", "operator.ana", *words, env=env)
            assert ran.code == 0, ran.err
            found: dict[str, Any] = json.loads(ran.out)["data"]
            return found

        await says(".lena", "submit", "--job", "hers", "--gpu", "1", "--", "sh", "-c", "echo secret; sleep 600")
        await until(lambda: _runs(says), 60.0, "the job runs")
        assert "secret" in await says(".lena", "logs", "--no-follow", "hers")
        await says(".lena", "exec", "hers", "--", "true")
        assert "secret" in await says(".omar", "logs", "--no-follow", "hers")
        assert "secret" in await says("", "logs", "--no-follow", "hers")

        async def all_there() -> bool:
            return len((await told())["acts"]) == 3

        await until(all_there, ANSWER_S, "both reads are listed")
        first = await told("--after", "0")
        assert [(row["verb"], row["by"], row["job"]) for row in first["acts"]] == [
            ("exec", "tenant:acme/lena", "hers"),
            ("logs", "tenant:acme/omar", "hers"),
            ("logs", "tenant:acme", "hers"),
        ], "her own reads are nobody's business"
        assert all(row["came"].startswith("import MOORAGE_TENANT_acme U") for row in first["acts"])
        assert (await told("--after", first["next"]))["acts"] == []
        await says(".omar", "exec", "hers", "--", "true")
        assert [row["by"] for row in (await told("--after", first["next"]))["acts"]] == ["tenant:acme/omar"]
        ran = await moorage(
            "usage", "--by", "person", "--json", "--nats", "submitter.acme", "--tenant", "acme", env=env
        )
        assert [row["person"] for row in json.loads(ran.out)["data"]["rows"]] == ["lena"], ran.out
        ran = await moorage("show", "hers", "--nats", "submitter.acme", "--tenant", "acme", env=env)
        assert "tenant:acme/omar" in ran.out, ran.out


async def _runs(says: Any) -> bool:
    return bool(json.loads(await says("", "show", "hers", "--json"))["data"]["state"] == "RUNNING")
