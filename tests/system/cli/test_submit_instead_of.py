"""Fixes as they are printed: pasted into a shell they do what they say, on a server and for every made-up state."""

from __future__ import annotations

import json
import random
import shlex
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage.cli.framework.options import ROWS
from moorage.cli.jobs.instead import as_words, as_words_of_new, changed
from moorage.cli.jobs.job_flags import JobFlags, fields_of, scheduling_of
from moorage.cli.jobs.submit import _one_of
from moorage.client import AsyncClient
from moorage.client.errors import NoScheduler, Rejected, client_problem
from moorage.schemas.answers.jobs import Fix
from moorage.schemas.job import Request
from tests.system.cli.node import Node
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.queries.test_fixes import ASKS, HOSTS, fixes, world
from tests.unit.scheduler.queries.test_fixes_with_policies import World

_FLAGS = {"--gpu": "gpu", "--replicas": "replicas", "--cpu": "cpu", "--memory": "memory", "--time-limit": "time_limit"}
_OF = {"cpu": float}


def made(asked: dict[str, Any], words: list[str]) -> Request:
    """What `submit --instead-of` would hand in for these words."""
    said: dict[str, Any] = {}
    fresh: dict[str, Any] = {}
    if "--gang" in words:
        words.remove("--gang")
        said["gang"] = True
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option == "--but":
            fresh = json.loads(value)
        else:
            name = _FLAGS[option]
            said[name] = _OF.get(name, str)(value)
    flags = JobFlags(**said)
    return changed(asked, flags, (), fields_of(flags), scheduling_of(flags), fresh)


def same(asked: dict[str, Any], fix: dict[str, Any]) -> None:
    """The words of a fix make the very request that was tried."""
    wanted = {name: value for name, value in {**asked, **fix["request"]}.items() if value is not None}
    words = shlex.split(as_words(msgspec.convert(fix, Fix)))
    found = made(asked, words)
    tried = msgspec.convert(json.loads(msgspec.json.encode({**wanted, "job": found.job})), Request)
    assert (found.effective_gpu, found.replicas) == (tried.effective_gpu, tried.replicas), (asked, fix, words)
    assert msgspec.structs.replace(found, gpu=None, resource_requirements=None) == msgspec.structs.replace(
        tried, gpu=None, resource_requirements=None
    ), (asked, fix, words)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HOSTS, st.lists(ASKS, max_size=6), ASKS)
def test_the_words_of_a_fix_are_what_was_tried(
    hosts: list[tuple[str, int, str, int]], jobs: list[dict[str, Any]], asks: dict[str, Any]
) -> None:
    drive = world(hosts, jobs, asks)
    for fix in fixes(drive, "j") if drive.states("j")[0] == "QUEUED" else []:
        same({"run": {"driver": "noop"}, **asks}, fix)


def test_the_words_of_a_gang_on_several_hosts_are_those_of_its_token() -> None:
    drive = Driving()
    for name in "abcdefgh":
        drive.worker(name, 8, modes=["exclusive"])
    asks = {"gpu": {"count": 64, "model": "H100"}, "run": {"driver": "noop"}}
    drive.submit("j", **asks)
    gang = drive.fixes("j")[0]
    assert as_words(msgspec.convert(gang, Fix)) == "--gpu 8x8xH100 --gang"
    same(asks, gang)
    asks = {"gpu": {"scheduling": "gang", "distinct_hosts": True}, "replicas": 9, "run": {"driver": "noop"}}
    drive.submit("apart", **asks)
    near = drive.fixes("apart")[0]
    assert as_words(msgspec.convert(near, Fix)) == "--gpu 9x1xany --gang"
    same(asks, near)


def test_those_of_a_gang_that_is_not_submitted_yet_go_with_its_hosts() -> None:
    """--replicas was told, which --hosts refuses, and --but, which only --instead-of takes."""
    drive = Driving()
    for name in "abc":
        drive.worker(name, 4, modes=["exclusive"])
    drive.submit("holds", gpu={"count": 4}, replicas=2, run={"driver": "noop"})
    asks = {"gpu": {"count": 4, "model": "H100", "scheduling": "gang", "distinct_hosts": True}, "replicas": 3}
    drive.submit("apart", **asks, run={"driver": "noop"})
    told = [as_words_of_new(msgspec.convert(fix, Fix), apart=True) for fix in drive.fixes("apart")]
    assert told == ['{"gpu":{"count":4,"model":"H100"}} in its request', "--hosts 1"]
    gang = Fix(request={"gpu": {}, "replicas": 3}, gpu="3x4xany", gang=True)
    assert as_words_of_new(gang, apart=True) == "--gpu 3x4xany --gang, without --hosts"
    assert as_words_of_new(gang, apart=False) == "--gpu 3x4xany --gang"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_so_are_those_under_every_rule_of_the_queue() -> None:
    met = 0
    for seed in range(40):
        asked = World(seed)
        for key in asked.waiting():
            for fix in asked.fixes(key):
                if "command" not in fix:
                    same(asked.asked[key], fix)
                    met += 1
    assert met > 20


def test_what_no_token_can_say_stays_as_it_was_asked() -> None:
    asked = {
        "gpu": {"count": 2, "vendor": "amd", "scheduling": "gang"}, "replicas": 3, "run": {"argv": ["a"]},
        "requires": {"a": ["b"], "c": ["d"]}, "labels": {"team": "x"},
    }  # fmt: skip
    found = made(asked, ["--gpu", "1xMI300X", "--cpu", "4"])
    assert found.gpu is not None
    assert (found.gpu.vendor, found.gpu.scheduling, found.gpu.model) == ("amd", "gang", "MI300X")
    assert (found.replicas, found.requires, found.labels) == (3, asked["requires"], asked["labels"])
    flags = JobFlags(requires=["a="])
    assert changed(asked, flags, (), fields_of(flags), {}, {}).requires == {"c": ["d"]}


@pytest.mark.slow
async def test_a_fix_pasted_into_the_shell_starts_the_job(node: Node, unique: str) -> None:
    waiting: dict[str, dict[str, Any]] = {
        "vendor": {"gpu": {"vendor": "amd"}},
        "compute": {"gpu": {"min_compute_capability": "12.0"}},
        "memory": {"gpu": {"min_memory_mib": 900_000}},
        "slot": {"gpu": {"sharing": "time-slice", "time_slice_index": 60}},
        "count": {"gpu": {"count": 6, "model": "H100"}},
        "label": {"gpu": {}, "requires": {"zone": ["nowhere"]}},
        "host-size": {"gpu": {}, "resources": {"cpu_milli": 9_000_000, "memory_mib": 99_999_999}},
        "gang-size": {"gpu": {"count": 4, "scheduling": "gang"}, "replicas": 5},
    }
    async with AsyncClient(node.url, tenant=unique) as client:
        other = await client.submit(["true"], gpu="1xT4", on_no_match="wait")
        told = await node.run("explain", other.job, tenant=unique)
        assert dict(row[:2] for row in told.rows)["reason"].startswith("model:"), told.out
        assert "--instead-of" not in told.err, "another model is never offered"
        await other.cancel()
        for reason, asks in waiting.items():
            job = await client.submit({**asks, "run": {"argv": ["true"]}, "on_no_match": "wait"})
            told = await node.run("explain", job.job, tenant=unique)
            assert dict(row[:2] for row in told.rows)["reason"].startswith(f"{reason}:"), told.out
            lines = [line for line in told.err.splitlines() if "moorage submit --instead-of" in line]
            assert lines, (reason, told.err)
            words = shlex.split(lines[0][lines[0].index("moorage submit") :])
            pasted = await node.run(*words[1:], tenant=unique)
            assert pasted.code == 0, pasted.err
            assert (await client.job(pasted.out.strip()).result("90s")).state == "SUCCEEDED"
            gone = await job.show()
            assert (gone.state, gone.why) == ("CANCELLED", f"replaced by job {pasted.out.strip()}")


@pytest.mark.slow
async def test_nothing_is_given_up_for_what_is_refused(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        runs = await client.submit(["sleep", "60"], gpu="1xH100")
        async for event in runs.events():
            if event.state == "RUNNING":
                break
        waits = await client.submit(["true"], gpu="1xT4", on_no_match="wait")
        await client.admin.limit(gpus=2, tenant=unique)
        for words, code, found in (
            ((runs.job, "--gpu", "1xL40S"), 1, "only a waiting job can be changed"),
            ((waits.job,), 2, "nothing to change"),
            ((waits.job, "--gpu", "4xH100"), 1, "error[failed-precondition]"),
            ((waits.job, "--but", "[]"), 2, "an object with fields of the request"),
            ((waits.job, "--but", "{"), 2, "--but is not JSON"),
            ((waits.job, "--but", '{"nosuch": 1}'), 2, "nosuch"),
            (("nosuch", "--gpu", "1"), 3, "error[not-found]"),
        ):
            ran = await node.run("submit", "--instead-of", *words, tenant=unique)
            assert (ran.code, found in ran.err) == (code, True), (words, ran.err)
            assert "Traceback" not in ran.err
        over = await client.submit(["true"], job="over")
        await over.result()
        ran = await node.run("submit", "--instead-of", "over", "--gpu", "1", tenant=unique)
        assert "fix: moorage again over, with the same options" in ran.err
        assert (await waits.show()).state == "QUEUED"
        assert (await runs.show()).state == "RUNNING"
        await client.admin.limit(gpus=0, jobs=2, tenant=unique)
        ran = await node.run("submit", "--instead-of", waits.job, "--gpu", "1xL40S", tenant=unique)
        assert ran.code == 0, f"at the limit of jobs the old one makes room for the new one: {ran.err}"
        assert (await waits.show()).state == "CANCELLED"
        await client.job(ran.out.strip()).cancel()
        await client.admin.limit(jobs=0, tenant=unique)
        for job in (waits, runs):
            await job.cancel()


async def test_of_a_job_in_place_of_another_it_is_said_whether_it_may_be_there(
    node: Node, nats_url: str, unique: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is cancelled by then: its user has to know whether to send the request again."""
    taken = msgspec.convert({"job": "taken", "gpu": {}, "run": {"argv": ["true"]}}, Request)
    other = msgspec.structs.replace(taken, priority=60)

    async def change(_: AsyncClient) -> tuple[str, Request]:
        return "gone", other

    async with AsyncClient(node.url, tenant=unique) as client:
        await client.submit(taken)
        await client.submit(msgspec.structs.replace(taken, job="gone"))
        with pytest.raises(Rejected):
            await _one_of(client, change, ROWS)
        said = capsys.readouterr().err
        assert "job gone was cancelled, and the request in its place was refused" in said
        assert '"priority":60' in said

        async def submit(*_: object) -> None:
            raise NoScheduler(client_problem("no-scheduler", "no answer"))

        monkeypatch.setattr(client, "submit", submit)
        with pytest.raises(NoScheduler):
            await _one_of(client, change, ROWS)
        said = capsys.readouterr().err
        assert "whether job taken in its place was accepted is not known. Submit this request again" in said
    async with AsyncClient(nats_url, tenant=unique, timeout="300ms") as client:
        with pytest.raises(NoScheduler):
            await _one_of(client, change, ROWS)
    said = capsys.readouterr().err
    assert "job gone may have been cancelled, and job taken in its place was not submitted" in said
    assert '"priority":60' in said


def test_a_change_that_cannot_be_is_refused_before_anything_is_asked() -> None:
    asked = {"gpu": {"sharing": "time-slice", "time_slice_index": 1}, "run": {"argv": ["a"]}}
    with pytest.raises(Rejected, match="by its index"):
        made(asked, ["--gpu", "2xH100"])


def test_words_survive_any_model_name() -> None:
    rng = random.Random(7)
    for _ in range(200):
        model = "".join(rng.choice("ABx-9 '\"$`=") for _ in range(6)).strip(" =") or "A"
        gpu = {"count": 1, "model": ["H100", model]}
        words = shlex.split(as_words(Fix(request={"gpu": gpu})))
        assert made({"gpu": {"model": "H100"}, "run": {"argv": ["a"]}}, words).gpu is not None
