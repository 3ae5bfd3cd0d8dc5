"""The manifests of `deploy/kubernetes`: by a real API server that is strict about fields and about pods without rights,
and by what `moorage admin nats-config` writes for their Secrets."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from moorage.bus.embedded import find_binary
from moorage.cli.main import run
from moorage.worker.drivers.kubernetes.api import Cluster, ClusterError
from tests.clusters import ApiServer, api_server, why_no_cluster
from tests.docs.markdown import DOCS, page

DEPLOY: Final = DOCS.parent / "deploy" / "kubernetes"
PAGE: Final = DOCS / "how-to" / "run-in-kubernetes.md"
CHECKED: Final = "checked"


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pods(name: str) -> dict[str, dict[str, Any]]:
    """The specs of the pods that a file makes."""
    return {
        made["metadata"]["name"]: made["spec"]["template"]["spec"]
        for made in objects(name)
        if "template" in made.get("spec", {})
    }


def secrets_of_the_page() -> dict[str, set[str]]:
    """The Secrets that the page makes, with the files in each."""
    [commands] = [block.body for block in page(PAGE).blocks if "create secret" in block.body]
    lines = commands.replace("\\\n", " ").splitlines()
    made = [re.match(r"kubectl -n moorage create secret generic (\S+) (.*)", line) for line in lines]
    return {each[1]: set(re.findall(r"--from-file=(\S+)", each[2])) for each in made if each}


def test_the_workers_of_the_page_are_those_of_the_file() -> None:
    [shown] = [block.body for block in page(PAGE).blocks if block.title == "moorage.yaml"]
    assert (DEPLOY / "worker.yaml").read_text() == shown


def test_each_secret_has_what_nats_config_writes_and_no_other_key(tmp_path: Path) -> None:
    [commands] = [block.body for block in page(PAGE).blocks if "create secret" in block.body]
    words = commands.replace("\\\n", " ").splitlines()[0].split()
    assert words[:5] == ["moorage", "admin", "nats-config", "--out", "/etc/moorage"]
    assert run(["admin", "nats-config", "--out", str(tmp_path), *words[5:]]) == 0
    made = secrets_of_the_page()
    for name, files in made.items():
        for file in files:
            assert (tmp_path / file).is_file(), f"{name}: {file}"
    mounted = {}
    for spec in pods("fleet.yaml").values():
        for volume in spec["volumes"]:
            if "secret" in volume:
                items = volume["secret"].get("items")
                mounted[volume["secret"]["secretName"]] = items and {each["path"] for each in items}
    assert mounted == {"nats": None, "scheduler": made["scheduler"], "metrics": made["metrics"]}
    assert {file for files in made.values() for file in files if file.endswith(".nk")} == {
        "keys/scheduler.main.nk",
        "keys/ledger.main.nk",
        "keys/operator.metrics.nk",
    }


def test_each_server_begins_with_its_own_file(tmp_path: Path) -> None:
    [container] = pods("fleet.yaml")["nats"]["containers"]
    shell, option, script = container["command"]
    asked = [shell, option, script.replace("exec nats-server", "echo")]
    told = [
        subprocess.run(asked, env={"HOSTNAME": f"nats-{at}"}, capture_output=True, text=True, check=True).stdout.split()
        for at in range(3)
    ]
    assert [words[-1] for words in told] == [f"/etc/moorage/server-{at}.conf" for at in (1, 2, 3)]
    flags = subprocess.run([find_binary(), "--help"], capture_output=True, text=True, check=False)
    assert told[0][0] in re.findall(r"--\w+", flags.stdout + flags.stderr)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    if why := why_no_cluster():
        pytest.skip(why)
    with api_server() as server:
        yield server


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("name", sorted(file.name for file in DEPLOY.iterdir()))
async def test_the_api_server_takes_every_object_and_knows_every_field(server: ApiServer, name: str) -> None:
    cluster = Cluster(server.kubeconfig())
    for made in objects(name):
        await _create(cluster, made)
        if name == "fleet.yaml":
            wrong = {**made, "spec": {**made["spec"], "spce": 1}}
            with pytest.raises(ClusterError, match="unknown field"):
                await _create(cluster, wrong)
    await cluster.close()


async def _create(cluster: Cluster, made: dict[str, Any]) -> None:
    """Apply an object as `kubectl apply --dry-run=server --validate=strict` would."""
    version, kind, namespace = made["apiVersion"], made["kind"].lower(), made["metadata"].get("namespace")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"{root}/namespaces/{namespace}" if namespace else root
    name = made["metadata"]["name"]
    how = {"fieldValidation": "Strict", "fieldManager": "test", "force": "true", "dryRun": "All"}
    path = f"{place}/{kind}{'es' if kind.endswith('s') else 's'}/{name}"
    await cluster._ask("PATCH", path, how, made, "application/apply-patch+yaml")


@pytest.mark.slow
@pytest.mark.cluster
async def test_pods_of_the_fleet_need_no_right_and_a_worker_only_its_two_folders(server: ApiServer) -> None:
    """By the API server's own rules of pod security, of which `restricted` is the strictest."""
    cluster = Cluster(server.kubeconfig())
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": CHECKED, "labels": label}}
    await cluster._ask("POST", "/api/v1/namespaces", None, namespace)
    for name, spec in pods("fleet.yaml").items():
        await _try(cluster, name, spec)
    [worker] = pods("worker.yaml").values()
    with pytest.raises(ClusterError, match="restricted volume types") as refused:
        await _try(cluster, "worker", worker)
    assert '"state"' in str(refused.value)
    assert '"site"' in str(refused.value)
    await cluster.close()


async def _try(cluster: Cluster, name: str, spec: dict[str, Any]) -> None:
    data = {"name": "data", "emptyDir": {}}
    claimed = {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]}
    volumes = [*spec["volumes"], *([data] if "data" in claimed else [])]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {**spec, "volumes": volumes, "serviceAccountName": ""},
    }
    await asyncio.wait_for(cluster._ask("POST", f"/api/v1/namespaces/{CHECKED}/pods", {"dryRun": "All"}, pod), 60)
