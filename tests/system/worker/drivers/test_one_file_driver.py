"""A driver of one file, `parrot.py`: found in three ways, with its own settings, and what it declares is held."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from moorage.client import AsyncClient, JobFailed
from moorage.schemas.capabilities import FENCES, KNOWN, Capabilities
from moorage.schemas.errors import Refused
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Run
from moorage.schemas.settings import NO_FILE, SettingsFile, read_file
from moorage.worker.agent.run import start
from moorage.worker.driver import Executes, Freezes, KeepsFolders, KeepsOutput
from moorage.worker.drivers import BUILT_IN
from moorage.worker.drivers.handler.driver import HandlerDriver
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.loading import GROUP, find
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.settings import WorkerSettings
from tests.servers import Server
from tests.system.live.stack import QUICK, caller, stack
from tests.system.worker.parrot import Parrot, ParrotSettings

WORD = "tests.system.worker.parrot:Parrot"


def file_of(folder: Path, text: str) -> SettingsFile:
    path = folder / "moorage.toml"
    path.write_text(text)
    return read_file(path)


def offer(folder: Path, value: str, name: str = "parrot") -> None:
    """Make a package in this folder that offers a driver, as pip would have installed it."""
    about = folder / "parrots-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: parrots\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value}\n")


def test_it_is_found_as_module_and_class_and_by_an_entry_point(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Refused) as refused:
        find(["parrot"], NO_FILE, {}, simulated=False)
    assert refused.value.problem.message == "no driver parrot"
    assert refused.value.problem.allowed == "process, noop, docker, podman, kubernetes, vm, module:Class of your own"
    offer(tmp_path, WORD)
    for word in (WORD, "parrot"):
        process, parrot = find(["process", word], NO_FILE, {}, simulated=False)
        assert (process.kind, process.foreign) == (ProcessDriver, False)
        assert (parrot.kind, parrot.foreign, parrot.own) == (Parrot, True, ParrotSettings())
    with pytest.raises(Refused, match="two drivers have the name parrot"):
        find(["parrot", WORD], NO_FILE, {}, simulated=False)


def test_one_line_makes_it_a_driver_that_comes_with_moorage(monkeypatch: Any) -> None:
    monkeypatch.setitem(BUILT_IN, "parrot", WORD)
    (parrot,) = find(["parrot"], NO_FILE, {}, simulated=False)
    assert (parrot.kind, parrot.foreign) == (Parrot, False)


def test_an_entry_point_has_the_name_of_its_driver(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    offer(tmp_path, WORD, "polly")
    with pytest.raises(Refused, match="polly: the class has the name 'parrot'; give the entry point the same name"):
        find(["polly"], NO_FILE, {}, simulated=False)


def test_its_settings_are_those_of_the_environment_then_the_file_then_its_own_defaults(tmp_path: Path) -> None:
    file = file_of(tmp_path, '[driver.parrot]\nbetween = "-"\ntimes_max = 3\n')
    (found,) = find([WORD], file, {"MOORAGE_DRIVER_PARROT_TIMES_MAX": "7"}, simulated=False)
    assert found.own == ParrotSettings("-", 7)


def test_the_log_says_which_settings_of_a_driver_are_set_and_not_to_what(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(tmp_path, '[driver.parrot]\nbetween = "hunter2"\n')
    with caplog.at_level(logging.INFO):
        find([WORD], file, {"MOORAGE_DRIVER_PARROT_TIMES_MAX": "7"}, simulated=False)
    assert "settings of the driver parrot: between (" in caplog.text
    assert "; times_max (MOORAGE_DRIVER_PARROT_TIMES_MAX)" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("text", "env", "told", "allowed"),
    [
        ("[driver.parrot]\nbetwen = 1\n", {}, "[driver.parrot] has no key 'betwen'", "between, times_max"),
        ("[driver.parrot]\ntimes_max = 0\n", {}, "times_max of [driver.parrot] must be", "a whole number, 1..100"),
        (
            "",
            {"MOORAGE_DRIVER_PARROT_TIMES_MAX": "x"},
            "times_max of [driver.parrot] must be",
            "a whole number, 1..100",
        ),
        ('[driver.parrot]\nbetween = "\\n"\n', {}, "between must be in one line", ""),
        ("[driver.parot]\ntimes_max = 1\n", {}, "[driver.parot] in ", "parrot, process"),
        ("[driver.process]\nfast = true\n", {}, "[driver.process] has no key 'fast'", "gpu_enabled"),
        ("driver = 1\n", {}, "driver in ", ""),
        ("[driver]\ntimes_max = 1\n", {}, "driver.times_max in ", ""),
    ],
)
def test_a_setting_that_it_does_not_declare_is_refused_with_what_is_allowed(
    tmp_path: Path, text: str, env: dict[str, str], told: str, allowed: str
) -> None:
    with pytest.raises(Refused) as refused:
        find([WORD, "process"], file_of(tmp_path, text), env, simulated=False)
    problem = refused.value.problem
    assert problem.code == "bad-settings"
    assert told in problem.message
    assert problem.allowed == allowed
    assert problem.next
    assert "()" not in problem.next, "no flag that does not exist"


def test_a_driver_that_runs_nothing_is_of_simulated_workers() -> None:
    find(["noop"], NO_FILE, {}, simulated=True)
    with pytest.raises(Refused, match="the driver noop runs nothing: only simulated workers offer it"):
        find(["noop"], NO_FILE, {}, simulated=False)


def test_gpu_enabled_of_a_driver_is_its_setting_and_its_capability(tmp_path: Path) -> None:
    for text, enabled in (("", True), ("[driver.process]\ngpu_enabled = false\n", False)):
        (found,) = find(["process"], file_of(tmp_path, text), {}, simulated=True)
        kit = Kit(
            "w0", WorkerSettings(tmp_path, "w0", "p"), Policy({}, {}, {}, None, {}), SupervisorLink(tmp_path), 1, True
        )
        driver = found.make(kit)
        assert driver.can().gpu_enabled is enabled
        assert driver.can().config == ["gpu_device_ids", "cdi_devices", "device_ids"]
        driver.check_block(Request(run=Run(argv=["x"])))
        gpus = Request(run=Run(argv=["x"]), gpu=GpuSpec())
        if enabled:
            driver.check_block(gpus)
            continue
        with pytest.raises(Refused) as refused:
            driver.check_block(gpus)
        assert (refused.value.code, refused.value.problem.field) == ("failed-precondition", "$.gpu")


class Odd(Parrot):
    name = "odd"
    capabilities = Capabilities(fence="hope")


def test_a_fence_is_one_of_those_that_exist() -> None:
    with pytest.raises(Refused, match="its fence must be one of agent, supervisor, none, found 'hope'"):
        find(["tests.system.worker.drivers.test_one_file_driver:Odd"], NO_FILE, {}, simulated=False)


class Promises(Parrot):
    name = "promises"
    capabilities = Capabilities(execs=True)


def test_a_driver_has_the_methods_of_what_its_capabilities_say() -> None:
    """It was found once a command was run in its job."""
    with pytest.raises(Refused, match="its capabilities say Executes, and it lacks a method of that protocol"):
        find(["tests.system.worker.drivers.test_one_file_driver:Promises"], NO_FILE, {}, simulated=False)
    assert issubclass(Parrot, KeepsOutput)
    assert not any(issubclass(Parrot, each) for each in (KeepsFolders, Executes, Freezes))


def test_what_a_client_knows_of_a_driver_is_what_that_driver_declares() -> None:
    for driver in (ProcessDriver, NoopDriver, HandlerDriver):
        assert driver.capabilities == KNOWN[driver.name]
        assert driver.capabilities.fence in FENCES


@pytest.mark.slow
async def test_sdk_and_scheduler_know_of_it_what_it_declares(nats_server: Server, unique: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, '[driver.parrot]\nbetween = ", "\n')
    settings = WorkerSettings(tmp_path, "aviary", unique, simulate="2xT4", drivers=(WORD, "noop"), leases=False)
    async with stack(nats_server, unique) as made, caller(made) as operator:
        await made.scheduler(config=QUICK)
        worker = await start(settings, made.url, file)
        try:
            await operator.leader()
            await operator.workers_up("aviary")
            (row,) = (await operator.fleet())["workers"]
            told = row["capabilities"]["parrot"]
            assert told.pop("enforced") == {
                "exclusive": {"memory": "hard", "compute": "hard"},
                "time-slice": {"memory": "advisory", "compute": "advisory"},
            }
            assert told.pop("resizes") == {"time-slice": "counted"}
            assert told == {
                "needs_argv": True,
                "keeps_output": True,
                "ends_streams": True,
                "uses_devices": False,
                "config": ["times", "code"],
            }
            assert row["capabilities"]["noop"]["simulated_only"]
            async with AsyncClient(made.url, tenant="acme", prefix=unique) as client:
                await use(client)
        finally:
            await worker.stop()


async def use(client: AsyncClient) -> None:
    assert "parrot" not in client._wire._histories.drivers
    ran = await client.run(["hello"], driver="parrot", driver_config={"parrot": {"times": 3}}, wait="60s")
    assert (ran.stdout, ran.stderr, ran.lost_bytes) == ("hello, hello, hello\n", "", 0)
    assert client._wire._histories.drivers.can("parrot").keeps_output, (
        "the first job of it that ran told what it can do"
    )
    capabilities = (await client.job(ran.job).show()).capabilities
    assert capabilities is not None
    assert capabilities.ends_streams
    async with asyncio.timeout(60):
        assert "".join([piece.text async for piece in client.job(ran.job).logs()]) == "hello, hello, hello\n"
    failing = await client.submit(["why"], driver="parrot", driver_config={"parrot": {"code": 3}})
    with pytest.raises(JobFailed) as failed:
        await failing.result("60s")
    assert (failed.value.exit_code, failed.value.log_tail) == (3, "why"), "its output is asked for, since it is kept"
    for config, argv, why in (
        (
            {"parrot": {"time": 3}},
            ["x"],
            "the driver parrot reads no driver_config.parrot.time; the nearest is times",
        ),
        ({"parrot": {"times": "often"}}, ["x"], "driver_config.parrot: Expected `int`, got `str`"),
        ({"parrot": 5}, ["x"], "driver_config.parrot must be an object"),
        ({"parrot": {"times": 9}}, ["x"], "times must be 1..5"),
        ({"noop": 5}, [], "the driver parrot needs argv"),
    ):
        job = await client.submit(argv, driver="parrot", driver_config=config)
        with pytest.raises(JobFailed) as failed:
            await job.result("60s")
        assert failed.value.result.state == "FAILED"
        assert why in failed.value.result.why
