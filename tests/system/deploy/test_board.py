"""The Grafana board: by Grafana's schema, and by a real Prometheus that scrapes a real fleet and answers each query."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.leftover import ends_with_the_test
from tests.ports import free_ports
from tests.system.cli.node import Lines, node_on, start
from tests.system.deploy.parts import parts, why_no_parts
from tests.waiting import until
from tools.board import ROWS, board, metrics, named

DEPLOY: Final = Path(__file__).resolve().parents[3] / "deploy"
FILE: Final = DEPLOY / "grafana" / "moorage.json"
QUERIES: Final = [query for panels in ROWS.values() for panel in panels for query in panel.queries]
#: of an hour that is over, of services, or of faults that a sound fleet of one server has not
NOTHING_YET: Final = re.compile(r"_gpu_seconds|moorage_failures|moorage_service_|ledger_copies|state(!=|=~)")
SCRAPED_S: Final = 60.0


def by_schema(board: dict[str, Any]) -> Any:
    """The board as Grafana's types read and write it: a field that they do not know is gone."""
    return json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))


def test_the_board_is_what_the_script_makes_and_every_field_is_of_grafanas_schema() -> None:
    register_default_plugins()
    assert FILE.read_text() == board()
    read = json.loads(FILE.read_text())
    assert by_schema(read) == read
    wrong = copy.deepcopy(read)
    wrong["panels"][1]["titel"] = "x"
    assert by_schema(wrong) != wrong
    numbers = [panel["id"] for panel in read["panels"]]
    assert len(set(numbers)) == len(numbers) == len(ROWS) + sum(map(len, ROWS.values()))


def test_what_grafana_is_given_at_its_start_names_files_of_the_composition() -> None:
    """Grafana itself is in no package, so it is not started: its two files are read for what they name."""
    composed = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]["grafana"]
    mounted = dict(volume.split(":")[:2] for volume in composed["volumes"])
    for source in mounted:
        assert not source.startswith(".") or (DEPLOY / source).exists()
    provisioning = DEPLOY / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "moorage.yml").read_text())["providers"]
    assert mounted["./grafana/moorage.json"].startswith(provider["options"]["path"] + "/")
    home = composed["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == mounted["./grafana/moorage.json"]


def test_every_query_names_metrics_that_there_are() -> None:
    assert {name for query in QUERIES for name in named(query)} <= set(metrics())


class Prometheus:
    def __init__(self, port: int) -> None:
        self._at = f"http://127.0.0.1:{port}/api/v1/"

    async def ask(self, path: str, **arguments: str) -> dict[str, Any]:
        def get() -> dict[str, Any]:
            with urllib.request.urlopen(f"{self._at}{path}?{urllib.parse.urlencode(arguments)}", timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
            return found

        told = await asyncio.to_thread(get)
        assert told["status"] == "success", told
        data: dict[str, Any] = told["data"]
        return data

    async def series(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.ask("query", query=query))["result"]
        return found


@asynccontextmanager
async def prometheus_on(folder: Path, target: str) -> AsyncIterator[Prometheus]:
    """Debian's Prometheus with the configuration of `deploy/prometheus`, but another target, each second."""
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    assert config.count("metrics:9470") == config.count("scrape_interval: 5s") == 1
    config = config.replace("metrics:9470", target).replace("scrape_interval: 5s", "scrape_interval: 1s")
    folder.mkdir()
    (folder / "prometheus.yml").write_text(config)
    (folder / "alerts.yml").write_text((DEPLOY / "prometheus" / "alerts.yml").read_text())
    [port] = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *(parts() / "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=subprocess.PIPE,
    )
    ends_with_the_test(process)
    await Lines(process.stderr).until("Server is ready")
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        await process.communicate()


@pytest.mark.slow
async def test_every_query_runs_on_a_prometheus_that_scrapes_a_fleet(tmp_path: Path) -> None:
    if why := why_no_parts("prometheus"):
        pytest.skip(why)
    async with node_on(tmp_path / "node", simulate="2x4xH100") as node:
        assert (await node.run("admin", "limit", "--gpus", "3", tenant="vision")).code == 0
        assert (await node.run("run", "--gpu", "2xH100", "--", "true", tenant="vision")).code == 0
        assert (await node.run("run", "--gpu", "1xH100", "--", "false", tenant="vision")).code == 1
        assert (await node.run("submit", "--gpu", "1xH100", "--", "sleep", "600", tenant="vision")).code == 0
        assert (await node.run("submit", "--gpu", "3xH100", "--replicas", "2", "--", "true", tenant="vision")).code == 0
        serving = await start("metrics", "--listen", "0", env=node.env())
        said = Lines(serving.stderr)
        await said.until("until Ctrl-C")
        [target] = re.findall(r"http://(127\.0\.0\.1:\d+)/metrics", said.text)
        async with prometheus_on(tmp_path / "prometheus", target) as prometheus:

            async def scraped_twice() -> bool:
                seen = await prometheus.series("count_over_time(moorage_model_idle_gpus[1h])")
                return bool(seen) and float(seen[0]["value"][1]) >= 2

            await until(scraped_twice, SCRAPED_S, "two scrapes")
            answers = {query: await prometheus.series(query) for query in QUERIES}
            empty = [query for query, series in answers.items() if not series and not NOTHING_YET.search(query)]
            assert empty == []
            [free] = answers["moorage_model_free_gpus"]
            assert free["value"][1] == "7"
            [idle] = answers["moorage_model_idle_gpus"]
            assert idle["value"][1] == "1", "a simulated GPU does nothing"
            rules = (await prometheus.ask("rules"))["groups"][0]["rules"]
            assert len(rules) == (DEPLOY / "prometheus" / "alerts.yml").read_text().count("- alert:")
            await until_healthy(prometheus)
        serving.terminate()
        await serving.communicate()


async def until_healthy(prometheus: Prometheus) -> None:
    """Until every rule of the alerts has been evaluated without an error."""

    async def evaluated() -> bool:
        rules = (await prometheus.ask("rules"))["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, rules
        return all(rule["health"] == "ok" for rule in rules)

    await until(evaluated, SCRAPED_S, "each rule is evaluated")
