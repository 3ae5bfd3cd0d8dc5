"""How long `run`, `submit` and `cancel` wait for an answer, and what they say meanwhile and after it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import HOST, find_binary
from moorage.client import AsyncClient, NoScheduler
from tests.leftover import ends_with_the_test
from tests.ports import free_ports
from tests.system.cli.node import Lines, moorage, start
from tests.unit.client.scripted_scheduler import ScriptedScheduler

CHANGES: Final = {
    "run": ("--job", "one", "--", "true"),
    "submit": ("--job", "one", "--", "true"),
    "cancel": ("one",),
}
#: what may have happened, and the verb of the request that was on its way
MAY_HAVE_BEEN: Final = {
    "run": ("accepted", "submit"), "submit": ("accepted", "submit"), "cancel": ("cancelled", "cancel")
}  # fmt: skip


async def one_of_a_cluster(folder: Path) -> str:
    """The URL of a server that is one of two, of which the other does not run."""
    client, route, other = free_ports(3)
    conf = folder / "nats.conf"
    routes = f'routes: ["nats-route://{HOST}:{other}"]'
    conf.write_text(f'listen: "{HOST}:{client}"\ncluster {{ name: "c", listen: "{HOST}:{route}", {routes} }}\n')
    ends_with_the_test(
        await asyncio.create_subprocess_exec(find_binary(), "-c", str(conf), stderr=asyncio.subprocess.DEVNULL)
    )
    url = f"nats://{HOST}:{client}"
    await (await connect(url, "test")).close()  # it runs
    return url


@pytest.mark.parametrize("limit", ["15s", "45s"])
@pytest.mark.parametrize("verb", sorted(CHANGES))
async def test_they_wait_as_long_as_a_takeover_takes_and_say_so(
    nats_url: str, tmp_path: Path, unique: str, verb: str, limit: str
) -> None:
    """They gave up after 10 s, while a takeover with three servers takes up to 25 s."""
    url = nats_url if limit == "15s" else await one_of_a_cluster(tmp_path)
    process = await start(verb, *CHANGES[verb][:-2], "--nats", url, "--tenant", unique, *CHANGES[verb][-2:])
    err = Lines(process.stderr)
    await err.until("\n")
    happened, asked = MAY_HAVE_BEEN[verb]
    at = url.removeprefix("nats://")
    assert err.text == (
        f"no scheduler answers yet: `{asked}` was sent at {at}; this command asks again for up to {limit}\n"
    )
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
    await err.until("cancel: moorage cancel")
    assert f"interrupted before the scheduler answered: job one may have been {happened}\n" in err.text
    assert err.text.count("no scheduler answers yet") == 1


async def test_other_verbs_wait_ten_seconds(nats_url: str, unique: str) -> None:
    process = await start("ls", "--nats", nats_url, "--tenant", unique)
    await Lines(process.stderr).until("no scheduler answers yet; this command asks again for up to 10s\n")
    process.send_signal(signal.SIGINT)
    await process.wait()


async def test_one_that_is_given_holds(tmp_path: Path, unique: str) -> None:
    """As an option, a variable or in the settings file."""
    url = await one_of_a_cluster(tmp_path)
    settings = tmp_path / "moorage.toml"
    settings.write_text('[client]\ntimeout = "20s"\n')
    for words, env, limit in (
        (("--timeout", "30s"), {}, "30s"),
        ((), {"MOORAGE_CLIENT_TIMEOUT": "25s"}, "25s"),
        ((), {"MOORAGE_SETTINGS": str(settings)}, "20s"),
    ):
        process = await start("submit", "--nats", url, "--tenant", unique, *words, "--", "true", env=env)
        await Lines(process.stderr).until(f"again for up to {limit}\n")
        process.send_signal(signal.SIGINT)
        await process.wait()


@pytest.mark.parametrize("verb", ["run", "submit", "many"])
async def test_after_a_time_out_too_it_says_which_job_may_have_been_accepted(
    nats_url: str, unique: str, tmp_path: Path, verb: str
) -> None:
    many = tmp_path / "many.json"
    many.write_text('[{"job": "one", "run": {"argv": ["true"]}}]')
    words = ("submit", "-f", str(many)) if verb == "many" else (verb, *CHANGES[verb][:2], "--", "true")
    place = ("--nats", nats_url, "--tenant", unique)
    async with ScriptedScheduler(nats_url, unique) as scheduler:
        scheduler.will("submit", None)
        ran = await moorage(words[0], *place, "--timeout", "3s", *words[1:])
    assert (ran.code, ran.out) == (5, "")
    word = f"'=one' {' '.join(place)}"
    told = (
        "no answer came: job one may have been accepted\n"
        f"  check: moorage show {word}   cancel: moorage cancel --before {word}\n"
        "error[no-scheduler]: "
    )
    assert told in ran.err, ran.err
    ran = await moorage(words[0], *place, "--timeout", "500ms", *words[1:])
    assert "error[no-scheduler]: no scheduler listens" in ran.err
    assert "may have been accepted" not in ran.err, "nobody has heard it"


@pytest.mark.parametrize("limit", ["15s", "45s"])
async def test_the_sdk_waits_for_a_change_as_long_as_the_command_where_nobody_said_how_long(
    nats_url: str, tmp_path: Path, unique: str, limit: str
) -> None:
    url = nats_url if limit == "15s" else await one_of_a_cluster(tmp_path)
    async with AsyncClient(url, tenant=unique) as client:
        waits_s = [client._wire._timeout_s(verb) for verb in ("submit", "cancel", "ls")]
        assert waits_s == ([45, 45, 30] if limit == "45s" else [30, 30, 30])
    async with AsyncClient(url, tenant=unique, timeout="300ms") as client:
        with pytest.raises(NoScheduler, match=r"tried for 0\.3 s"):
            await client.submit(["true"])
