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
    of_jobs = {
        made["metadata"]["name"]: made["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        for made in objects(name)
        if made["kind"] == "CronJob"
    }
    return of_jobs | {
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
        "keys/observer.page.nk",
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


@pytest.mark.parametrize("name", ["fleet.yaml", "worker.yaml"])
def test_each_pod_says_what_it_needs_so_that_no_full_node_evicts_it_first(name: str) -> None:
    for pod, spec in pods(name).items():
        for container in spec["containers"]:
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, pod


def test_no_two_servers_share_a_node_and_each_has_room_for_a_tenant() -> None:
    for name in ("nats", "scheduler"):
        [spread] = pods("fleet.yaml")[name]["topologySpreadConstraints"]
        assert (spread["topologyKey"], spread["maxSkew"]) == ("kubernetes.io/hostname", 1)
        assert spread["whenUnsatisfiable"] == "DoNotSchedule"
    [nats] = [made for made in objects("fleet.yaml") if made["kind"] == "StatefulSet"]
    [claim] = nats["spec"]["volumeClaimTemplates"]
    assert int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) >= 61, "as the page counts it"


def test_policies_let_nobody_reach_a_port_that_no_pod_opens_for_them() -> None:
    policies = [made["spec"] for made in objects("fleet.yaml") if made["kind"] == "NetworkPolicy"]
    assert any(policy["podSelector"] == {} and "ingress" not in policy for policy in policies), "nobody, by default"
    opened = {port["port"] for policy in policies for rule in policy.get("ingress", ()) for port in rule["ports"]}
    listened = {
        port["containerPort"]
        for spec in pods("fleet.yaml").values()
        for container in spec["containers"]
        for port in container.get("ports", ())
    }
    assert opened == listened
    [routes] = [rule for policy in policies for rule in policy.get("ingress", ()) if rule["ports"][0]["port"] == 6222]
    assert routes["from"] == [{"podSelector": {"matchLabels": {"app": "moorage-nats"}}}], "servers alone"


def test_what_a_site_fills_in_is_in_the_files() -> None:
    [made] = objects("kustomization.yaml")
    [image] = made["images"]
    assert made["resources"] == ["fleet.yaml", "worker.yaml"]
    specs = [spec for name in made["resources"] for spec in pods(name).values()]
    of_pods = {each["image"] for spec in specs for each in (*spec["containers"], *spec.get("initContainers", ()))}
    assert of_pods == {f"{image['name']}:{image['newTag']}"}
    there = {(each["kind"], each["metadata"]["name"]): each for name in made["resources"] for each in objects(name)}
    for patch in made["patches"]:
        for change in yaml.safe_load(patch["patch"]):
            place: Any = there[patch["target"]["kind"], patch["target"]["name"]]
            for word in change["path"].split("/")[1:]:
                place = place[int(word) if word.isdigit() else word]
            assert place == change["value"]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("name", ["fleet.yaml", "worker.yaml"])
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
    """As `kubectl apply --server-side` does. The API server of the tests is of 1.20, which has budgets and jobs by the
    clock in v1beta1."""
    if made["apiVersion"] in ("policy/v1", "batch/v1"):
        made = {**made, "apiVersion": made["apiVersion"] + "beta1"}
    version, kind, namespace = made["apiVersion"], made["kind"].lower(), made["metadata"].get("namespace")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"{root}/namespaces/{namespace}" if namespace else root
    how = {"fieldManager": "test", "force": "true"}
    path = f"{place}/{kind.removesuffix('y')}{'ies' if kind[-1] == 'y' else 's'}/{made['metadata']['name']}"
    await cluster._ask("PATCH", path, how, made, "application/apply-patch+yaml")
