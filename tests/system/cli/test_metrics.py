"""`moorage metrics` on a real node: what is scraped, who may, and the alerts that stand on it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

import pytest
from msgspec import convert, structs
from prometheus_client.parser import text_string_to_metric_families

from moorage.bus.contexts import Context
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import BUS_CODES, PermissionRefused
from moorage.cli.fleet import metrics
from moorage.client import AsyncClient
from moorage.client.errors import NoScheduler, client_problem
from moorage.schemas.answers.fleet import (
    AppendFigures,
    ContainedFailures,
    FleetAnswer,
    FollowerRow,
    SchedulerRow,
    WorkerInfo,
)
from moorage.schemas.answers.operators import UsageRow
from moorage.schemas.cells import STATES
from moorage.schemas.errors import CODES, MoorageError, Problem, problem
from moorage.schemas.frames import Answer
from moorage.schemas.operate import Limit, TenantRow
from moorage.schemas.release import RELEASE
from moorage.system.build import build
from tests.system.cli.node import Lines, Node, moorage, node_on, start
from tests.system.services.members import FUNCTIONS
from tests.waiting import until

FAULTS: Final = {code: fault for code, (fault, _) in {**CODES, **BUS_CODES}.items()}
ALERTS = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Series:
    """By name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(series: Series, name: str, **labels: str) -> float:
    return sum(value for (each, has), value in series.items() if each == name and labels.items() <= dict(has).items())


async def scrape(address: str) -> Series:
    def get() -> str:
        with urllib.request.urlopen(address, timeout=30) as answer:
            body: bytes = answer.read()
        return body.decode()

    return read(await asyncio.to_thread(get))


@pytest.mark.slow
async def test_once_it_is_what_the_fleet_says(node: Node, unique: str) -> None:
    assert (await node.run("admin", "limit", "--gpus", "3", tenant=unique)).code == 0
    ran = await node.run("metrics")
    assert (ran.code, ran.err) == (0, "")
    series = read(ran.out)
    fleet = (await node.run("fleet", "--json")).frame["data"]
    assert total(series, "moorage_up") == 1
    assert total(series, "moorage_epoch") == fleet["epoch"]
    assert total(series, "moorage_gpus") == sum(worker["gpus"] for worker in fleet["workers"])
    assert total(series, "moorage_gpus", simulated="true") >= 8
    assert total(series, "moorage_workers") == len(fleet["workers"])
    assert total(series, "moorage_model_gpus") == sum(row["gpus"] for row in fleet["fits_now"])
    assert total(series, "moorage_tenant_limit_gpus", tenant=unique) == 3


@pytest.mark.slow
async def test_served_it_says_whether_a_leader_answers(tmp_path: Path) -> None:
    async with node_on(tmp_path / "node", simulate="2x4xH100") as node:
        serving = await start("metrics", "--listen", "0", "--timeout", "5s", env=node.env())
        said = Lines(serving.stderr)
        await said.until("until Ctrl-C")
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", said.text)
        assert total(await scrape(address), "moorage_gpus", state="free") == 8
        await node.stop()

        async def is_down() -> bool:
            return total(await scrape(address), "moorage_up") == 0

        await until(is_down, 90)  # an answer of a moment ago serves the next scrape, too
        assert total(await scrape(address), "moorage_gpus") == 0
        await said.until("no leader answers")
        serving.send_signal(signal.SIGINT)
        assert await serving.wait() == 130


@pytest.mark.slow
async def test_how_long_jobs_waited_is_a_histogram_by_gpus_and_by_tenant(node: Node, unique: str) -> None:
    def jobs(series: Series, name: str, **labels: str) -> float:
        return total(series, f"moorage_{name}_count", **labels)

    before = read((await node.run("metrics")).out)
    for gpus in ("1xH100", "2xH100"):
        assert (await node.run("run", "--gpu", gpus, "--", "true", tenant=unique)).code == 0
    after = read((await node.run("metrics")).out)
    assert jobs(after, "tenant_wait_seconds", tenant=unique) == 2
    assert total(after, "moorage_ended_jobs_total", tenant=unique) == 2
    assert total(after, "moorage_ended_jobs_total", tenant=unique, state="SUCCEEDED") == 2
    for gpus in ("1", "2-7"):
        assert jobs(after, "wait_seconds", gpus=gpus) == jobs(before, "wait_seconds", gpus=gpus) + 1
    assert total(after, "moorage_tenant_wait_seconds_bucket", tenant=unique, le="+Inf") == 2
    assert total(after, "moorage_tenant_wait_seconds_bucket", tenant=unique, le="600") == 2
    assert 0 <= total(after, "moorage_tenant_wait_seconds_sum", tenant=unique) < 600


@pytest.mark.slow
async def test_calls_are_counted_by_service_and_shown_on_top(node: Node, unique: str) -> None:
    """Members that no job started, one after the other: the second one counts from zero, and the totals go on."""

    async def counted(**of: str) -> Series:
        series = read((await node.run("metrics")).out)
        return {
            key: value
            for key, value in series.items()
            if key[0].startswith("moorage_service_") and of.items() <= dict(key[1]).items()
        }

    async def calls(*data: str) -> None:
        for each in data:
            assert (await node.run("call", "odd", "-", tenant=unique, stdin=each)).code == (1 if each == "exit" else 0)

    async def until_counted(number: int) -> None:
        async def is_counted() -> bool:
            return total(await counted(service="odd"), "moorage_service_calls_total", tenant=unique) == number

        await until(is_counted, what=f"{number} calls are counted")

    path = {"PYTHONPATH": str(FUNCTIONS.parent)}
    for number, data in ((3, ("a", "b", "exit")), (4, ("c",))):
        serving = await start("serve", "--name", "odd", "--tenant", unique, "functions:odd", env=node.env() | path)
        await Lines(serving.stderr).until("serves")
        await calls(*data)
        await until_counted(number)
        if number == 3:
            serving.terminate()
            await serving.communicate()
    found = await counted(tenant=unique, service="odd")
    for name, value in (("errors_total", 1), ("members", 1), ("woken_total", 0), ("refused_total", 0)):
        assert total(found, f"moorage_service_{name}") == value
    for name in ("wait_seconds", "run_seconds"):
        assert (
            total(found, f"moorage_service_{name}_count")
            == total(found, f"moorage_service_{name}_bucket", le="+Inf")
            == 4
        )
    (shown,) = [row for row in (await node.run("top", "--json")).frame["services"] if row["tenant"] == unique]
    assert (shown["service"], shown["members"], shown["calls"], shown["errors"]) == ("odd", 1, 4, 1)
    assert f"{unique}/odd 4 (1 failed) of 1 member" in (await node.run("top", "--once")).out
    serving.terminate()
    await serving.communicate()


async def test_a_scrape_waits_for_no_silent_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the result of the question before, so a monitor with a short time-out sees the 0, too."""
    silent = asyncio.Event()

    async def ask(client: AsyncClient) -> metrics.Told:
        await silent.wait()
        raise NoScheduler(client_problem("no-scheduler", "nobody leads"))

    monkeypatch.setattr(metrics, "_ask", ask)
    monkeypatch.setattr(metrics, "SCRAPE_S", 0.01)
    scraped = metrics._Scraped(AsyncClient("nats://127.0.0.1:1"), Context())
    first = await scraped._read()
    assert [family.samples[0].value for family in first if family.name == "moorage_up"] == [0]
    asking = scraped._asking
    assert asking is not None, "the question goes on"
    assert await scraped._read() is first
    assert scraped._asking is asking, "and is not asked twice"
    silent.set()
    await asking
    assert scraped._families is not first


class Beside:
    """A client whose leader answers all that it has in memory; `verb` fails as `told` says, or never ends for None."""

    _wire = fleet = property(lambda self: self)

    def __init__(self, verb: str, told: MoorageError | None) -> None:
        self.verb, self.told = verb, told

    async def show(self) -> FleetAnswer:
        return EMPTY

    async def operate(self, verb: str, asked: object = None) -> Answer:
        if verb == self.verb and self.told is None:
            await asyncio.Event().wait()
        if verb == self.verb and self.told is not None:
            raise self.told
        return Answer(verb, 1, {"counts": {"t": 3}} if verb == "dlq" else {})


@pytest.mark.parametrize("verb", ["usage", "dlq"])
@pytest.mark.parametrize("told", ["behind", "overloaded", None])
async def test_an_answer_that_the_leader_waits_for_keeps_nobody_from_all_else(
    verb: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * metrics.BESIDE_S_MAX < metrics.ANSWER_S_MAX, "the other questions have time, too"
    monkeypatch.setattr(metrics, "BESIDE_S_MAX", 0.01)
    error = None if told is None else MoorageError(problem(told, "not now"))
    found = await metrics._ask(cast(AsyncClient, Beside(verb, error)))
    assert (found.fleet, found.letters) == (EMPTY, None if verb == "dlq" else {"t": 3})
    assert ("moorage_dead_letters" in {family.name for family in metrics.families(found)}) == (verb != "dlq")


@pytest.mark.parametrize("verb", ["usage", "dlq"])
async def test_a_key_that_may_not_ask_is_told(verb: str) -> None:
    with pytest.raises(PermissionRefused):
        await metrics._ask(cast(AsyncClient, Beside(verb, PermissionRefused("publish", "moorage.admin.ana." + verb))))


async def test_scrapes_that_come_close_together_cost_the_leader_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    async def ask(client: AsyncClient) -> metrics.Told:
        asked.append(client)
        return metrics.Told()

    monkeypatch.setattr(metrics, "_ask", ask)
    scraped = metrics._Scraped(AsyncClient("nats://127.0.0.1:1"), Context())
    both = await asyncio.gather(scraped._read(), scraped._read())
    assert (len(asked), both[0]) == (1, both[1])
    monkeypatch.setattr(metrics, "FRESH_S", 0.0)
    await scraped._read()
    assert len(asked) == 2, "an old answer serves nobody"


@pytest.mark.slow
async def test_a_service_that_starts_before_any_leader_says_that_none_is_up(fresh_server: EmbeddedServer) -> None:
    serving = await start("metrics", "--listen", "0", "--timeout", "200ms", env={"NATS_URL": fresh_server.url})
    said = Lines(serving.stderr)
    await said.until("until Ctrl-C")
    assert "no leader answers yet" in said.text
    (address,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", said.text)
    assert total(await scrape(address), "moorage_up") == 0
    serving.terminate()
    await serving.communicate()


@pytest.mark.parametrize("code", ["overloaded", "disconnected", "permission-refused"])
async def test_it_serves_while_the_leader_or_its_server_cannot_answer_but_not_with_a_key_that_may_not_ask(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    async def fails(_: object) -> metrics.Told:
        raise MoorageError(Problem(code, "x", FAULTS[code]))

    monkeypatch.setattr(metrics, "_ask", fails)
    began: list[object] = []

    def start_http_server(*at: object) -> None:
        began.append(at)
        raise OSError("the test ends here")

    with pytest.raises(MoorageError) as ended:
        await metrics._serve(
            cast(AsyncClient, None), Context(), None, SimpleNamespace(start_http_server=start_http_server), "h", 1
        )
    assert (bool(began), ended.value.code == code) == ((False, True) if code == "permission-refused" else (True, False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "code"),
    [
        (("metrics", "--listen", "0"), "cannot-connect"),
        (("page", "--listen", "0"), "cannot-connect"),
        (("scheduler", "--tflops-file", "/nonexistent/t.toml"), "bad-settings"),
        (("worker", "--id", "n1", "--simulate", "1x1xT4", "--state", "/dev/null/n1"), "failed-precondition"),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
async def test_the_last_words_of_a_service_are_an_entry_too_with_a_log_of_json(
    verb: tuple[str, ...], code: str
) -> None:
    ran = await moorage(*verb, "--log-format", "json", env={"NATS_URL": "nats://127.0.0.1:1"})
    assert ran.code != 0
    entries = [json.loads(line) for line in ran.err.splitlines()]
    assert (entries[-1]["level"], code in entries[-1]["message"], "fix: " in entries[-1]["message"]) == (
        "ERROR", True, True,
    ), ran.err  # fmt: skip


async def test_where_nobody_may_listen_is_told_with_what_to_do(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = await node.run("metrics", "--listen", str(port))
    assert ran.code == 1
    assert f"cannot listen at 127.0.0.1, port {port}: Address already in use" in ran.err
    wrong = await node.run("metrics", "--listen", "here")
    assert "--listen here is no address with a port" in wrong.err


async def test_series_do_not_grow_with_the_tenants(node: Node) -> None:
    fleet = (await node.run("fleet", "--json")).frame["data"]
    many = [TenantRow(f"t{number}", jobs=1, gpus=number) for number in range(metrics.TENANTS_MAX + 50)]
    found = {
        family.name: family.samples for family in metrics.families(metrics.Told(convert(fleet, FleetAnswer), many))
    }
    assert len(found["moorage_tenant_leased_gpus"]) == metrics.TENANTS_MAX
    assert min(sample.value for sample in found["moorage_tenant_leased_gpus"]) == 50
    assert [sample.value for sample in found["moorage_tenants"]] == [metrics.TENANTS_MAX + 50]
    limited = {
        family.name: family.samples
        for family in metrics.families(metrics.Told(convert(fleet, FleetAnswer), [TenantRow("t", limit=Limit(jobs=1))]))
    }
    assert limited["moorage_tenant_limit_gpus"] == []


@pytest.mark.slow
async def test_alerts_stand_on_series_that_there_are(node: Node, tmp_path: Path) -> None:
    fleet = (await node.run("fleet", "--json")).frame["data"] | {"ledger_copies": {"wanted": 3, "lacking": ["n2"]}}
    assert fleet["request_queue"]["bytes_max"] > 0
    told = metrics.Told(convert(fleet, FleetAnswer), certificates={"servers.crt": 1.0}, backups=tmp_path)
    names = {family.name for family in metrics.families(told)}
    rules = ALERTS.read_text()
    assert {name.removesuffix("_total") for name in re.findall(r"\bmoorage_\w+", rules)} <= names
    states = set("|".join(re.findall(r'moorage_gpus\{state=~?"([^"]+)"', rules)).split("|"))
    assert states <= {*STATES.values(), "shared"}


EMPTY: Final = FleetAnswer(appends=AppendFigures(records=1, seconds=0.001))


def test_what_only_counts_up_is_a_counter() -> None:
    fleet = structs.replace(EMPTY, contained=ContainedFailures(counts={"submit": 2, "frame": 0}))
    told = metrics.Told(fleet, ended={"t": {"FAILED": 3}})
    found = {family.name: family for family in metrics.families(told)}
    counters = {name for name, family in found.items() if family.type == "counter"}
    of_services = {f"moorage_service_{name}" for name in ("calls", "errors", "refused", "woken")}
    of_waits = {"moorage_waited_seconds", "moorage_waited_gpu_seconds"}
    of_waits |= {"moorage_promises", "moorage_promises_not_told"}
    assert counters == {"moorage_failures", "moorage_ended_jobs", "moorage_tenant_refused"} | of_services | of_waits
    samples = [(sample.name, sample.labels, sample.value) for sample in found["moorage_failures"].samples]
    assert ("moorage_failures_total", {"what": "submit"}, 2) in samples


def test_who_stands_by_who_is_not_heard_what_was_refused_and_what_history_lacks_are_told() -> None:
    schedulers = [SchedulerRow(scheduler="a", leads=True, release="1"), SchedulerRow(scheduler="b", release="2")]
    follower = FollowerRow(behind=2, gaps=[[0, 1, 30], [2, 3, 12]])
    states = ("up", "lost", "left", "stale")
    workers = [WorkerInfo(worker=f"n{at}", state=state, release="1") for at, state in enumerate(states)]
    fleet = structs.replace(EMPTY, schedulers=schedulers, follower=follower, workers=workers)
    told = metrics.families(metrics.Told(fleet, letters={"t": 3}))
    found = {(sample.name, *sample.labels.values()): sample.value for family in told for sample in family.samples}
    assert (found["moorage_standbys",], found["moorage_follower_behind_records",]) == (1, 2)
    assert (found["moorage_follower_gap_records",], found["moorage_dead_letters", "t"]) == (42, 3)
    assert {name[1] for name in found if name[0] == "moorage_worker_not_heard"} == {"n1", "n3"}
    assert {name[1]: many for name, many in found.items() if name[0] == "moorage_running_builds"} == {"1": 3, "2": 1}
    assert found["moorage_build_info", RELEASE, build()] == 1


def test_the_newest_backup_and_the_last_drill_are_told_also_without_a_leader(tmp_path: Path) -> None:
    def told(folder: Path | None) -> dict[str, float]:
        series = metrics.families(metrics.Told(backups=folder))
        return {each.name: each.samples[0].value for each in series if "backup" in each.name or "drill" in each.name}

    assert told(None) == {}, "on a host without backups nothing is said of them"
    none = {"moorage_backup_timestamp_seconds": 0.0, "moorage_restore_drill_timestamp_seconds": 0.0}
    assert told(tmp_path / "not there") == told(tmp_path) == none
    for name, at_s in (("moorage-1-7.backup", 1000), ("moorage-1-9.backup", 3000), ("other", 9000), ("restored", 2000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at_s, at_s))
    assert told(tmp_path) == {
        "moorage_backup_timestamp_seconds": 3000.0,
        "moorage_restore_drill_timestamp_seconds": 2000.0,
    }


def test_what_gpus_gave_in_the_last_whole_hour_is_told_by_tenant_and_model() -> None:
    usage = [UsageRow(tenant="t", model="H100", gpu_s=7200.0, used_gpu_s=3600.5)]
    found = {family.name: family.samples for family in metrics.families(metrics.Told(EMPTY, usage=usage))}
    for name, value in (("granted", 7200.0), ("used", 3600.5)):
        (sample,) = found[f"moorage_tenant_{name}_gpu_seconds"]
        assert (sample.labels, sample.value) == ({"tenant": "t", "model": "H100"}, value)
