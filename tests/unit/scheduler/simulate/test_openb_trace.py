"""The reader of openb traces: what the published files say, and errors that teach."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.schemas.errors import Refused
from moorage.testing.simulate.openb import TraceError, TraceTask, node_list, pod_lists, read_hosts, read_tasks

TRACES = Path(__file__).resolve().parents[4] / "bench/traces/openb"
NODES = "sn,cpu_milli,memory_mib,gpu,model\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n"


def test_the_published_fleet_is_what_the_paper_says() -> None:
    hosts = read_hosts(node_list(TRACES))
    assert (len(hosts), sum(host.gpus for host in hosts), len({host.model for host in hosts})) == (1213, 6212, 7)


def test_every_published_list_is_read_and_asks_for_whole_words() -> None:
    lists = pod_lists(TRACES)
    assert set(lists) == {"cpu050", "default", "gpushare100", "gpuspec10", "gpuspec33", "multigpu50"}
    tasks = {name: read_tasks(path) for name, path in lists.items()}
    assert len(tasks["default"]) == 8152
    assert sum(task.gpu_demand_milli for task in tasks["default"]) == 6_086_800
    assert all(not task.models for task in tasks["multigpu50"])  # a list without the column
    assert ("V100M16", "V100M32") in {task.models for task in tasks["gpuspec33"]}
    assert all(task.is_share for task in tasks["gpushare100"] if task.gpus)


def test_a_row_is_read_with_its_units(tmp_path: Path) -> None:
    path = tmp_path / "openb_pod_list_x.csv"
    path.write_text(PODS + "a,6000,12288,1,460,V100M16|V100M32|V100M32,10,25.5\nb,1,2,0,,,,\n")
    first, second = read_tasks(path)
    assert first == TraceTask("a", 6000, 12288, 1, 460, ("V100M16", "V100M32"), 10.0, 25.5)
    assert (second.gpus, second.gpu_milli, second.ended_s, second.is_share) == (0, 0, None, False)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("a,-5,1,0,0,,,\n", "line 2: cpu_milli is '-5', allowed: a whole number"),
        ("a,1,1,65,1000,,,\n", r"num_gpu is '65', allowed: a whole number 0\.\.64"),
        ("a,1,1,1,0,,,\n", r"gpu_milli is '0', allowed: 1\.\.1000 where GPUs are asked for"),
        ("a,1,1,2,500,,,\n", "only one GPU can be shared"),
        (",1,1,0,0,,,\n", "name is '', allowed: a word"),
        ("a,1,1,0,0,,soon,\n", "creation_time is 'soon', allowed: seconds"),
        ("a,1,1\n", "num_gpu is ''"),
        ("", "no rows below the first line"),
    ],
)
def test_a_bad_row_says_where_what_and_what_is_allowed(tmp_path: Path, rows: str, says: str) -> None:
    path = tmp_path / "openb_pod_list_x.csv"
    path.write_text(PODS + rows)
    with pytest.raises(Refused, match=says):
        read_tasks(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    nodes, pods = tmp_path / "openb_node_list_a.csv", tmp_path / "openb_pod_list_a.csv"
    nodes.write_text(NODES + "n,1,1,1,T4\nn,1,1,1,T4\n")
    pods.write_text("job,gpus\na,1\n")
    with pytest.raises(Refused, match="line 3: sn is 'n', allowed: a name of its own"):
        read_hosts(nodes)
    with pytest.raises(Refused, match=r"line 1: the first line must name name, .*; it lacks name") as caught:
        read_tasks(pods)
    assert caught.value.problem.found == "job, gpus"
    with pytest.raises(Refused, match="cannot be read"):
        read_tasks(tmp_path / "none.csv")


def test_a_folder_must_hold_one_node_list_and_some_pod_lists(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="found none"):
        node_list(tmp_path)
    with pytest.raises(TraceError, match="no file openb_pod_list"):
        pod_lists(tmp_path)
    for name in ("openb_node_list_a.csv", "openb_node_list_b.csv"):
        (tmp_path / name).write_text(NODES)
    with pytest.raises(TraceError, match=r"found openb_node_list_a\.csv, openb_node_list_b\.csv"):
        node_list(tmp_path)
