"""The manifests of `deploy/kubernetes`: by a real API server that is strict about fields, by what their pods may do,
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

from moorage.bus.site import MONITOR_BEHIND, PORT_DEFAULT
from moorage.cli.main import run
from moorage.worker.drivers.kubernetes.api import Cluster, ClusterError
from tests.clusters import ApiServer, api_server, why_no_cluster
from tests.sites import running
from tests.unit.docs.markdown import DOCS, page

DEPLOY: Final = DOCS.parent / "deploy" / "kubernetes"
PAGE: Final = DOCS / "how-to" / "run-in-kubernetes.md"


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
    made = [re.match(r"kubectl -n moorage-fleet create secret generic (\S+) (.*)", line) for line in lines]
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
    assert mounted == made
    assert [name for name, files in made.items() if any("tls/server" in file for file in files)] == ["nats"]
    assert {file for files in made.values() for file in files if file.endswith(".nk")} == {
        "keys/scheduler.main.nk",
        "keys/ledger.main.nk",
        "keys/operator.metrics.nk",
    }


def test_a_worker_may_read_no_secret_of_servers_and_schedulers() -> None:
    """They had one namespace, where the worker of any node could read the schedulers' keys."""
    read_by_workers = {
        made["metadata"].get("namespace")
        for made in objects("worker.yaml")
        if any("secrets" in rule["resources"] for rule in made.get("rules", ()))
    }
    of_the_fleet = {made["metadata"]["namespace"] for made in objects("fleet.yaml") if made["kind"] != "Namespace"}
    assert of_the_fleet == {"moorage-fleet"}
    assert None not in read_by_workers
    assert not read_by_workers & of_the_fleet
    [commands] = [block.body for block in page(PAGE).blocks if "create secret" in block.body]
    servers = re.findall(r"--server (\S+)", commands)
    assert servers == [f"nats-{at}.nats.moorage-fleet" for at in range(3)], "found from any namespace"


def test_each_server_begins_with_its_own_file(tmp_path: Path) -> None:
    [container] = pods("fleet.yaml")["nats"]["containers"]
    shell, option, script = container["command"]
    asked = [shell, option, script.replace("exec nats-server", "echo")]
    told = [
        subprocess.run(asked, env={"HOSTNAME": f"nats-{at}"}, capture_output=True, text=True, check=True).stdout.split()
        for at in range(3)
    ]
    assert told == [["-c", f"/etc/moorage/server-{at}.conf"] for at in (1, 2, 3)]


async def test_a_server_of_the_page_answers_each_probe_on_its_own_loopback_alone() -> None:
    """Probes of the kubelet ask the pod's address, where nothing listened: each server would have been killed."""
    [container] = pods("fleet.yaml")["nats"]["containers"]
    assert not [port for port in container["ports"] if port["containerPort"] > MONITOR_BEHIND + PORT_DEFAULT - 1]
    probes = [container[f"{name}Probe"]["exec"]["command"] for name in ("startup", "readiness", "liveness")]
    async with running(tenants=("vision",), monitor=True) as site:
        [server] = site.site.servers
        for probe in probes:
            asked = [word.replace("8222", str(server.port + MONITOR_BEHIND)) for word in probe]
            assert asked != probe
            assert await (await asyncio.create_subprocess_exec(*asked)).wait() == 0
        site.processes[0].kill()
        site.processes[0].wait()
        assert await (await asyncio.create_subprocess_exec(*asked, stderr=asyncio.subprocess.DEVNULL)).wait() != 0


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    if why := why_no_cluster():
        pytest.skip(why)
    with api_server() as server:
        yield server


#: the strictest of Kubernetes's own levels of pod security, `restricted`, as far as these pods say anything about it
BARE: Final = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
VOLUMES: Final = {"secret", "emptyDir", "persistentVolumeClaim"}


@pytest.mark.parametrize("name", sorted(pods("fleet.yaml")))
def test_pods_of_the_fleet_need_no_right(name: str) -> None:
    spec = pods("fleet.yaml")[name]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [each["securityContext"] for each in spec["containers"]] == [BARE] * len(spec["containers"])
    assert {key for volume in spec["volumes"] for key in volume} - {"name"} <= VOLUMES
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}


def test_a_worker_is_not_root_either_and_what_makes_its_folder_may_do_no_more() -> None:
    [spec] = pods("worker.yaml").values()
    assert spec["securityContext"]["runAsUser"] == 65532
    assert [each["securityContext"] for each in spec["containers"]] == [BARE]
    [makes] = spec["initContainers"]
    assert makes["command"] == ["chown", "65532:65532", "/var/lib/moorage"]
    assert makes["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("name", sorted(file.name for file in DEPLOY.iterdir()))
async def test_the_api_server_takes_every_object_and_knows_every_field(server: ApiServer, name: str) -> None:
    """It knows the fields of what is applied by the server, and of nothing else."""
    cluster = Cluster(server.kubeconfig())
    try:
        for made in objects(name):
            await _apply(cluster, made)
            if "spec" in made:
                with pytest.raises(ClusterError, match="not declared in schema"):
                    await _apply(cluster, {**made, "spec": {**made["spec"], "spce": 1}})
    finally:
        await cluster.close()


async def _apply(cluster: Cluster, made: dict[str, Any]) -> None:
    """As `kubectl apply --server-side` does. The API server of the tests is of 1.20, which has budgets in v1beta1."""
    if made["apiVersion"] == "policy/v1":
        made = {**made, "apiVersion": "policy/v1beta1"}
    version, kind, namespace = made["apiVersion"], made["kind"].lower(), made["metadata"].get("namespace")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"{root}/namespaces/{namespace}" if namespace else root
    how = {"fieldManager": "test", "force": "true"}
    path = f"{place}/{kind}s/{made['metadata']['name']}"
    await cluster._ask("PATCH", path, how, made, "application/apply-patch+yaml")
