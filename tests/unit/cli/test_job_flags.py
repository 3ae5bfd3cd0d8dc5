"""Flags as the fields of a request, and what of them is refused by the flag's own name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moorage.cli.jobs.bringing import not_brought, not_startable
from moorage.cli.jobs.flag_values import mebibytes, milli_cores
from moorage.cli.jobs.job_flags import JobFlags, fields_of, offered, refusing, request_of
from moorage.client import Rejected
from moorage.schemas.answers.jobs import Explained
from moorage.schemas.job import Request
from moorage.schemas.plan import Plan


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ({}, {}),
        ({"replicas": "3", "priority": 0, "if_seq": 0}, {"replicas": 3, "priority": 0, "if_seq": 0}),
        ({"replicas": "0-8", "service": "embed"}, {"replicas": {"min": 0, "max": 8}, "service": {"name": "embed"}}),
        (
            {"array": "0-9", "max_running": 2, "max_failed": "3"},
            {"indices": "0-9", "max_running": 2, "max_failed": 3},
        ),
        ({"array": "1-100"}, {"indices": "1-100"}),
        ({"array": "0-99,205%4"}, {"indices": "0-99,205", "max_running": 4}),
        ({"max_failed": "all"}, {"max_failed": None}),
        ({"cwd": "/srv", "user": "ana", "driver": "noop"}, {"cwd": "/srv", "user": "ana", "driver": "noop"}),
        ({"on_no_match": "reject", "on_partition": "keep"}, {"on_no_match": "reject", "on_partition": "keep"}),
        ({"qos": "low", "preemptible": True}, {"qos": "low", "preemptible": True}),
        ({"restart": "always", "max_restarts": 3}, {"restart": "always", "max_restarts": 3}),
        ({"ready": "tcp:PORT", "ports": 2}, {"ready": {"tcp": "PORT"}, "ports": 2}),
        ({"ready": "http:PORT_1/a:b", "ports": 2}, {"ready": {"http": "PORT_1/a:b"}, "ports": 2}),
        ({"ready": "file:out/ready,within=10m"}, {"ready": {"file": "out/ready", "within_s": 600}}),
        ({"after": ["a,b:any", "=last"]}, {"after": ["a", {"job": "b", "when": "any"}, "last"]}),
        ({"ready": "call,every=30s,within=1h"}, {"ready": {"call": True, "within_s": 3600, "every_s": 30}}),
        ({"service": "embed"}, {"service": {"name": "embed"}}),
        ({"service": "embed:8"}, {"service": {"name": "embed", "concurrency": 8}}),
        ({"time_limit": "1h", "deadline": "2h"}, {"limit": 3600, "deadline_s": 7200}),
        ({"start_within": "0s", "grace": "0"}, {"start_within_s": 0, "grace_s": 0}),
        ({"after": ["prep", "tidy:any"]}, {"after": ["prep", {"job": "tidy", "when": "any"}]}),
        ({"cpu": 0.5}, {"resources": {"cpu_milli": 500}}),
        ({"cpu": 4, "memory": "16Gi"}, {"resources": {"cpu_milli": 4000, "memory_mib": 16384}}),
        ({"env": ["A=1", "B=x=y"], "secret": ["T=hf"]}, {"env": {"A": "1", "B": "x=y", "T": {"secret": "hf"}}}),
        ({"label": ["team=vision"]}, {"labels": {"team": "vision"}}),
        ({"requires": ["zone=a,b"]}, {"requires": {"zone": ["a", "b"]}}),
        ({"image": "a:1", "driver": "docker"}, {"image": "a:1", "driver": "docker"}),
        ({"driver_config": '{"own": {"a": 1}}'}, {"driver_config": {"own": {"a": 1}}}),
        ({"gpu_device": ["0", "GPU-a"]}, {"driver_config": {"process": {"gpu_device_ids": ["0", "GPU-a"]}}}),
        (
            {"gpu_device": ["x/y=0"], "driver": "docker", "driver_config": '{"docker": {"image": "a"}, "vm": {}}'},
            {
                "driver": "docker",
                "driver_config": {"docker": {"image": "a", "gpu_device_ids": ["x/y=0"]}, "vm": {}},
            },
        ),
        (
            {"service": "embed:2", "batch": "32,5ms", "queue": "200,10s", "sleep_after": "5m", "awake_at_least": "9s"},
            {
                "service": {
                    "name": "embed",
                    "concurrency": 2,
                    "batch": {"most": 32, "wait_ms": 5},
                    "queue": {"most": 200, "wait_s": 10.0},
                    "sleep_after_s": 300.0,
                    "awake_s": 9.0,
                }
            },
        ),
    ],
)
def test_each_flag_is_a_field(flags: dict[str, Any], fields: dict[str, Any]) -> None:
    assert fields_of(JobFlags(**flags)) == fields


@pytest.mark.parametrize(
    ("array", "indices", "more"),
    [
        ("0-9:3", "0,3,6,9", {}),
        ("1-7:2%2", "1,3,5,7", {"max_running": 2}),
        ("0-4:2, 8-9:1,20", "0,2,4,8,9,20", {}),
        ("5-5:9", "5", {}),
        ("0-3", "0-3", {}),
    ],
)
def test_an_array_with_steps_is_written_out(array: str, indices: str, more: dict[str, int]) -> None:
    """`0-99:10`, as Slurm, PBS and HyperQueue have it, was refused without a way to write it."""
    assert fields_of(JobFlags(array=array)) == {"indices": indices, **more}


@pytest.mark.parametrize(
    ("flags", "says", "fix"),
    [
        ({"replicas": "many"}, "--replicas must be a number, or two with -", "for example --replicas 4, or 1-8"),
        ({"gpu": "H100:2"}, "--gpu: not a GPU token: 'H100:2'", "for example 1xH100"),
        (
            {"gpu": "2x4xH100", "array": "0-3"},
            "--gpu: 2x4xH100 asks for 2 replicas",
            "leave out the first number: 4xH100 are the GPUs of one replica",
        ),
        ({"array": "0-9%x"}, "--array: how many replicas run at once must follow", "for example --array 0-99%4"),
        ({"array": "%4"}, "--array: how many replicas run at once must follow", "for example --array 0-99%4"),
        (
            {"array": "9-0"},
            "--array: indices must be ranges that go up",
            "for example --array 0-99, 0-99,205, or 0-99:10",
        ),
        ({"array": "9-0:3"}, "--array 9-0:3 must go up, by steps from 1 on", "for example --array 0-99:10"),
        ({"array": "0-9:0"}, "--array 0-9:0 must go up, by steps from 1 on", "for example --array 0-99:10"),
        ({"array": "0-99999:2"}, "--array 0-99999:2 must go up, by steps from 1 on", "for example --array 0-99:10"),
        ({"array": "0-9/3"}, "--array: indices must be numbers and ranges", "for example --array 0-99, 0-99,205, or"),
        ({"array": "0-9%0"}, "--max-running: max_running must be 1..", ""),
        ({"array": "0-9%4", "max_running": 4}, "--array NUMBERS%N and --max-running say the same", "take one"),
        ({"array": "0-9", "replicas": "4"}, "--replicas: replicas must be left out", ""),
        ({"max_failed": "none"}, "--max-failed must be a number from 1 on, or all", "leave it out"),
        ({"time_limit": "1-12:30:00"}, "--time-limit: not a duration: '1-12:30:00'", "write it as 1d12h30m"),
        ({"time_limit": "12:00:00"}, "--time-limit: not a duration: '12:00:00'", "write it as 12h"),
        ({"time_limit": "soon"}, "--time-limit: not a duration: 'soon'", "write it as 90s"),
        (
            {"time_limit": "0"},
            "--time-limit 0 leaves no time to run",
            "--time-limit 10m; without this option the time has no bound",
        ),
        (
            {"deadline": "0s"},
            "--deadline 0s leaves no time to run",
            "--deadline 10m; without this option the time has no bound",
        ),
        ({"ready": "call,every=5"}, "--ready: a duration without a unit: 'every=5'", "write every=5s, or every=5m"),
        ({"after": ["last"]}, "--after: last names no job for good", "moorage ls shows ids; --after =last if a job"),
        ({"after": ["a,all:any"]}, "--after: all names no job for good", "moorage ls shows ids"),
        ({"after": ["prep:well"]}, "--after: behind the colon stands which end", "for example --after prep:any"),
        ({"after": ["a job"]}, "--after: after must match [A-Za-z0-9_-]{1,64}", ""),
        ({"after": ["a job:any"]}, "--after: job must match [A-Za-z0-9_-]{1,64}", ""),
        ({"memory": "16"}, "--memory: a size without a unit: '16'", "write 16G, or 16Mi"),
        ({"memory": "1.5"}, "--memory: a size without a unit: '1.5'", "write 1.5G, or 1.5Mi"),
        ({"memory": "lots"}, "--memory: not a size: 'lots'", "write it as 16Gi"),
        ({"memory": "-1G"}, "--memory: not a size: '-1G'", "write it as 16Gi"),
        ({"memory": "infG"}, "--memory: not a size: 'infG'", "write it as 16Gi"),
        ({"memory": f"{'9' * 400}G"}, "--memory: not a size: '999", "write it as 16Gi"),
        ({"cpu": float("nan")}, "--cpu is not a number of cores", "--cpu 4"),
        ({"cpu": 1e308}, "--cpu is not a number of cores", "--cpu 4"),
        ({"secret": ["hf_abc"]}, "--secret needs NAME=SECRET", "--secret NAME=SECRET"),
        ({"priority": 101}, "--priority: priority must be 0..100", ""),
        ({"cwd": "../here"}, "--cwd: cwd must be an absolute path on the worker", "give the full path"),
        ({"job": "a b"}, "--job: job must match", ""),
        (
            {"gang": True, "spread": True},
            "--gang and --spread cannot be used together: a gang takes",
            "leave out --spread; with --hosts 2",
        ),
        ({"gang": True}, "--gang, --hosts, --spread and --nvlink need --gpu", "add --gpu 1xH100"),
        ({"hosts": 2, "gpu": "4x2xH100"}, "--hosts 2 is a gang of 2 replicas, one on each host", "--hosts 2 --gpu 4x"),
        ({"hosts": 2, "replicas": "3", "gpu": "1"}, "--hosts 2 is a gang of 2 replicas", "--hosts 2 --gpu 4xH100"),
        ({"hosts": 0, "gpu": "1"}, "--hosts 0 is a gang of 0 replicas", "--hosts 2 --gpu 4xH100"),
        (
            {"hosts": 2, "gpu": "1", "array": "0-9"},
            "--array and --hosts cannot be used together",
            "moorage submit --hosts",
        ),
        ({"hosts": 2, "gpu": "1", "spread": True}, "--hosts and --spread cannot be used together", "leave out --spr"),
        ({"spread": True, "pack": True, "service": "e"}, "--spread and --pack cannot be used together", "take one"),
        ({"setup_limit": "5m"}, "--setup-limit is about the command of --setup", "give the command with --setup"),
        (
            {"sleep_after": "5m", "service": "e"},
            "--sleep-after: only a job that has its GPUs alone can sleep",
            "give a time, as --sleep-after 5m, and GPUs of its own",
        ),
        ({"sleep_after": "5m"}, "--sleep-after is about the calls", "name the service with --service"),
        ({"pack": True}, "--pack is about the members of a service", "name the service with --service"),
        ({"gpu_device": ["0", "0"]}, "--gpu-device: the device 0 is named twice", "leave the ids out"),
        (
            {"gpu_device": ["0"], "gpu": "2"},
            "--gpu-device: driver_config.process.gpu_device_ids lists 1 device",
            "leave the ids out",
        ),
        ({"gpu_device": [" "]}, "--gpu-device: an id must not be blank", "leave the ids out"),
        ({"driver_config": "{"}, "--driver-config is not JSON", "--driver-config '{"),
        ({"driver_config": "5"}, "--driver-config must be an object", "--driver-config '{"),
        (
            {"driver_config": '{"process": {"gpu_device_ids": ["1"]}}', "gpu_device": ["0"]},
            "--driver-config names devices for the driver process as well",
            "leave out --gpu-device",
        ),
        ({"driver": "docker,"}, "--driver has an empty name", "--driver docker,process"),
        ({"image": "a:1"}, "--image: the driver process runs no image", "give a driver"),
        ({"stall": "10m"}, "--stall: stall_s looks at the work of GPUs", "ask for a GPU"),
        ({"on_stall": "end"}, "--on-stall: on_stall needs stall_s", "say how long"),
        ({"ready": "tcp"}, "--ready: not a check", "for example --ports 1 --ready http:PORT/health"),
        ({"ready": "call:x"}, "--ready: not a check", "for example"),
        ({"ready": "udp:80"}, "--ready: not a check", "for example"),
        ({"ready": "tcp:80,soon=1s"}, "--ready: not a check", "for example"),
        ({"ready": ",within=2m"}, "--ready: not a check", "for example"),
        ({"ready": "tcp:80,every=soon"}, "--ready: not a duration: 'soon'", "write it as 90s"),
        ({"ready": "tcp:PORT"}, "--ready: PORT needs ports: at least 1, found 0", "name a port as PORT"),
        ({"ready": "call"}, "--ready: ready by call needs service", "add --service NAME"),
        ({"max_restarts": 3}, "--max-restarts: max_restarts needs restart", "add restart"),
        ({"restart": "always", "retries": 2}, "--retries: retries are further attempts", "leave out retries"),
        ({"service": "em.bed"}, "--service: a service needs a name", "name it as embed"),
        ({"service": "embed:x"}, "--service: a number of calls must follow", "for example --service embed:8"),
        ({"service": "embed:0"}, "--service: concurrency must be 1..4096", "say how many"),
        ({"service": f"embed:{'9' * 5000}"}, "--service: concurrency must be 1..4096", "say how many"),
        ({"batch": "32"}, "--batch is about the calls of a service", "name the service with --service"),
        ({"service": "e", "batch": "many"}, "--batch needs the most calls of a batch", "for example --batch 32, or"),
        ({"service": "e", "batch": "32,5"}, "--batch needs the most calls of a batch", "for example --batch 32, or"),
        ({"service": "e", "batch": "32,soon"}, "--batch: not a duration: 'soon'", "for example --batch 32"),
        (
            {"service": "e", "batch": "0"},
            "--batch: most must be 1..1024",
            "say how many calls a batch has at most, as --batch 32,5ms",
        ),
        ({"service": "e", "batch": "2,1m"}, "--batch: wait_ms must be 0..10000", "say how long a call waits"),
        ({"queue": "32"}, "--queue is about the calls of a service", "name the service with --service"),
        ({"service": "e", "queue": "5s"}, "--queue needs the most calls that wait", "for example --queue 200, or"),
        (
            {"service": "e", "queue": "10001"},
            "--queue: most must be 0..10000",
            "say how many calls wait at a member, as --queue 200",
        ),
        ({"service": "e:99", "batch": "99"}, "--service: 99 batches of 99 calls are too many", "say how many calls"),
        ({"stall": "soon"}, "--stall: not a duration", "write it as 90s"),
        (
            {"retry": ["oom:2", "lost,oom:1"]},
            "--retry: retry names oom twice, and the first row",
            "name a cause once",
        ),
        ({"gpu": ""}, "--gpu: not a GPU token: ''", "for example 1xH100"),
        ({"on": [""]}, "--on names no worker", "name a worker"),
        ({"not_on": ["w1", ""]}, "--not-on names no worker", "name a worker"),
        ({"fair_key": ""}, "--fair-key is empty", "name a user or a customer"),
        ({"stall": "٣s"}, "--stall: not a duration", "write it as 90s"),
        ({"label": ["a=1", "b=1", "a=2"]}, "--label has a twice, with other values", "leave one out"),
        ({"requires": ["a=1", "a=2"]}, "--requires has a twice, with other values", "leave one out; zone=a,b is"),
        ({"uses": ["a=1", "a=2"]}, "--uses has a twice, with other values", "leave one out"),
        ({"data": ["a=sets/one"]}, "--data: data must name a source", "of a file or folder here: --data a=./sets/one"),
        ({"data": ["a=/x", "a=/y"]}, "--data has a twice, with other values", "leave one out"),
        ({"secret": ["A=x", "A=y"]}, "--secret has A twice, with other values", "leave one out"),
        ({"env": ["A=1"], "secret": ["A=x"]}, "A is a variable of --env and one of --secret", "leave one out"),
    ],
)
def test_what_cannot_be_is_told_by_its_flag(flags: dict[str, Any], says: str, fix: str) -> None:
    with pytest.raises(Rejected) as refused:
        request_of(JobFlags(**flags), ["true"])
    assert refused.value.why.startswith(says)
    assert refused.value.fixes[0].startswith(fix)


def test_a_variable_that_is_given_twice_has_the_last_value_and_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """As with other tools' -e, so that a script's own options can be overridden; it was silent."""
    request = request_of(JobFlags(env=["A=1", "B=1", "A=2", "B=1"], label=["a=1", "a=1"]), ["true"])
    assert (request.workload.env, request.labels) == ({"A": "2", "B": "1"}, {"a": "1"})
    assert capsys.readouterr().err == "warning[env]: --env has A twice: the last value counts\n"


def test_a_command_is_named_but_for_a_driver_that_runs_none() -> None:
    with pytest.raises(Rejected, match="no command to run"):
        request_of(JobFlags(), [])
    assert request_of(JobFlags(driver="noop"), []).workload.argv == []


@pytest.mark.parametrize(
    ("size", "mib"),
    [("0", 0), ("16Gi", 16384), ("1G", 954), ("512M", 489), ("1.5Gi", 1536), ("1GB", 954), ("500K", 1), ("1T", 953675)],
)
def test_sizes_are_rounded_up(size: str, mib: int) -> None:
    assert mebibytes(size) == mib


@pytest.mark.parametrize(("cores", "milli"), [(0, 0), (0.0001, 1), (0.1, 100), (1.0001, 1001), (64, 64_000)])
def test_cores_are_rounded_up(cores: float, milli: int) -> None:
    assert milli_cores(cores) == milli


def test_named_devices_imply_their_count() -> None:
    for flags in (JobFlags(gpu_device=["0", "1"]), JobFlags(gpu_device=["0", "1"], gpu="2")):
        request = request_of(flags, ["true"])
        assert request.gpu is not None
        assert (request.gpu.count, request.device_ids) == (2, ("0", "1"))


class Planning:
    """A client whose fleet could run some: `DRIVER`, or `DRIVER MODEL`. It keeps what was asked of it."""

    def __init__(self, *offered: str) -> None:
        self.offered = offered
        self.asked: list[Request] = []

    def why(self, driver: str) -> Explained:
        """Another model may help where the driver is offered."""
        return Explained(reason="model" if any(one.startswith(driver) for one in self.offered) else "driver")

    async def plan(self, request: Request) -> Plan:
        self.asked.append(request)
        driver = request.workload.driver
        waiting = (
            None if {driver, f"{driver} {request.gpu and request.gpu.model}"} & {*self.offered} else self.why(driver)
        )
        return Plan("now" if waiting is None else "never", 1, waiting=waiting)


@pytest.mark.parametrize(("fleet", "chosen"), [(("process",), "process"), (("own", "process"), "own"), ((), "own")])
async def test_of_several_drivers_the_first_that_is_offered(fleet: tuple[str, ...], chosen: str) -> None:
    client: Any = Planning(*fleet)
    flags = JobFlags(driver="own,process", gpu_device=["0"], on_no_match="reject")
    request = request_of(flags, ["x"])
    found = await offered(client.plan, flags, ["x"], request)
    assert (found.workload.driver, found.job, found.on_no_match) == (chosen, request.job, "reject")
    assert found.driver_config == {chosen: {"gpu_device_ids": ["0"]}}
    assert {asked.on_no_match for asked in client.asked} == {"wait"}
    assert [refusing(JobFlags(on_no_match=given)).on_no_match for given in (None, "wait")] == ["reject", "wait"]
    client.asked.clear()
    one = request_of(JobFlags(), ["x"])
    assert await offered(client.plan, JobFlags(), ["x"], one) is one
    assert client.asked == []


@pytest.mark.parametrize(
    ("fleet", "chosen"),
    [
        (("own A100", "process A100", "own L40S"), ("own", "A100")),
        (("process A100", "own L40S"), ("process", "A100")),  # another driver before other GPUs
        (("process T4", "own T4"), ("own", "T4")),
        (("process H100",), ("process", "A100")),  # none could: the first whose driver is offered
        ((), ("own", "A100")),
    ],
)
async def test_other_gpus_are_asked_for_where_no_worker_could_give_the_first(
    fleet: tuple[str, ...], chosen: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = JobFlags(driver="own,process", gpu="1xA100", or_gpu=["1xL40S", "3x2xT4"])
    request = request_of(flags, ["x"])
    client: Any = Planning(*fleet)
    found = await offered(client.plan, flags, ["x"], request)
    assert found.gpu is not None
    assert (found.workload.driver, found.gpu.model, found.job) == (*chosen, request.job)
    assert found.replicas == (3 if chosen[1] == "T4" else 1)
    said = "no worker could ever give 1xA100, or a limit refuses it; the job asks for 3x2xT4 instead\n"
    said = "" if chosen[1] == "A100" else said
    assert capsys.readouterr().err == said


async def test_other_gpus_stand_beside_the_first() -> None:
    flags = JobFlags(or_gpu=["1xL40S"])
    with pytest.raises(Rejected, match="--or-gpu needs --gpu"):
        await offered(Planning().plan, flags, ["x"], request_of(flags, ["x"]))


@pytest.mark.parametrize(
    ("words", "flags", "found"),
    [
        (["python3", "train.py", "conf.toml"], {}, "train.py"),
        (["python3", "train.py", "conf.toml"], {"with_": ["train.py"]}, "conf.toml"),
        (["python3", "train.py", "conf.toml"], {"with_": ["train.py", "./conf.toml"]}, ""),
        (["python3", "train.py"], {"with_": ["."]}, ""),
        (["python3", "src/net.py"], {"with_": ["src"]}, "src/net.py"),  # it is called net.py there
        (["python3", "src/net.py"], {"with_": ["."]}, ""),
        (["./train.py"], {"driver": "docker", "image": "a:1"}, "./train.py"),
        (["train.py"], {}, "train.py"),  # it is looked for in the worker's PATH, and is no program here
        (["train.py"], {"with_": ["train.py"]}, "train.py"),
        (["sh", "-c", "true"], {}, ""),
        (["python3", "train.py"], {"driver": "noop"}, ""),
        (["python3", "train.py"], {"cwd": "/srv"}, ""),
        (["python3", "net.py", "src"], {}, ""),
        (["python3", "{here}/train.py", "../x"], {}, ""),
    ],
)
def test_a_file_of_the_command_that_no_with_brings(
    words: list[str], flags: dict[str, Any], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    for name in ("train.py", "conf.toml", "src/net.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    request = request_of(JobFlags(**flags), [word.format(here=tmp_path) for word in words])
    assert not_brought(flags.get("with_", ()), request) == found


@pytest.mark.parametrize(
    ("words", "flags", "found"),
    [
        (["./work.sh", "a"], {"with_": ["src/work.sh"]}, "src/work.sh"),
        (["src/work.sh"], {"with_": ["."]}, "src/work.sh"),
        (["./work.sh"], {"with_": ["src"], "driver": "docker", "image": "a:1"}, "src/work.sh"),
        (["./ready.sh"], {"with_": ["src"]}, ""),
        (["sh", "work.sh"], {"with_": ["src"]}, ""),
        (["work.sh"], {"with_": ["src"]}, ""),  # a program of the worker's PATH
        (["{here}/src/work.sh"], {"with_": ["src"]}, ""),
        (["./work.sh"], {"with_": ["src"], "cwd": "/srv"}, ""),
    ],
)
def test_a_file_that_the_command_starts_and_that_is_no_program(
    words: list[str], flags: dict[str, Any], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    for name, mode in (("work.sh", 0o644), ("ready.sh", 0o755)):
        (tmp_path / "src" / name).touch(mode)
    monkeypatch.chdir(tmp_path)
    request = request_of(JobFlags(**flags), [word.format(here=tmp_path) for word in words])
    assert not_startable(flags["with_"], request) == found


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("16G", "warning[memory]: 16G is 15,259 MiB, as G is 1e9 bytes; 16Gi is 16,384 MiB\n"),
        ("1.5G", "warning[memory]: 1.5G is 1,431 MiB, as G is 1e9 bytes; 1.5Gi is 1,536 MiB\n"),
        ("16GB", "warning[memory]: 16GB is 15,259 MiB, as G is 1e9 bytes; 16Gi is 16,384 MiB\n"),
        ("16Gi", ""),
        ("16GiB", ""),
        ("512M", ""),
    ],
)
def test_a_size_that_most_tools_read_otherwise_is_said_in_both(
    size: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields_of(JobFlags(memory=size))
    assert capsys.readouterr().err == said


def test_a_gang_names_labels_to_share_or_any_place() -> None:
    flags = JobFlags(gpu="2x1xH100", gang=True)
    assert request_of(replace(flags, same=["rack", "row"]), ["true"]).same == ["rack", "row"]
    assert request_of(replace(flags, same=["any"]), ["true"]).same == []
    assert request_of(flags, ["true"]).same is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (JobFlags(gpu="2x1xH100", same=["rack"]), "--same is about the ranks of a gang"),
        (JobFlags(gpu="2x1xH100", spread=True, same=["rack"]), "--same is about the ranks of a gang"),
        (JobFlags(gpu="2x1xH100", gang=True, same=["a b"]), "--same"),
        (JobFlags(gpu="2x1xH100", gang=True, same=["rack", "any"]), "no label goes with it"),
        (JobFlags(gpu="2x1xH100", gang=True, same=["zone"], spread_over="zone"), "cannot have one zone and be spread"),
    ],
)
def test_labels_to_share_that_do_not_go_together_are_refused(flags: JobFlags, said: str) -> None:
    with pytest.raises(Rejected, match=said):
        request_of(flags, ["true"])
