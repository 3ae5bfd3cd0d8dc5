"""A service that trains, and its unit tests: the production scheduler in virtual time, no server, no GPU, no waiting.

pytest docs/examples/service_under_test.py
"""

from __future__ import annotations

import asyncio

import pytest

from moorage.client import AsyncClient, Gpu, JobFailed
from moorage.testing import Ran, SimFleet, SimulatedClock, Task

# ---------------------------------------------------------------------------------------------------- the service


async def train_and_rate(moorage: AsyncClient, runs: list[str]) -> dict[str, float]:
    """One training a run, each on two GPUs of 80 GB; then all are rated on one small GPU, in a single job.

    A run that fails for good is left out. Its id makes a training idempotent: asked for twice, it trains once.
    """
    for run in runs:
        gpu = Gpu("H100 | A100", count=2, memory="80G")
        await moorage.submit(["python", "train.py", run], gpu=gpu, job=f"train-{run}", retries=1)
    results = await moorage.wait([moorage.job(f"train-{run}") for run in runs], wait="1d")
    trained = [run for run, result in zip(runs, results, strict=True) if result.state == "SUCCEEDED"]
    rated = await moorage.run(["python", "rate.py", *trained], gpu="1xL40S", wait="1h")
    return {name: float(loss) for name, loss in (line.split() for line in rated.stdout.splitlines())}


# -------------------------------------------------------------------------------------------------------- its tests


class Programs:
    """What stands for `train.py` and `rate.py` in these tests: how long they take, what they say, how they end."""

    def __init__(self) -> None:
        self.trained: list[str] = []

    def __call__(self, task: Task) -> Ran:
        _, program, *runs = task.argv
        if program == "rate.py":
            return Ran(out="".join(f"{run} 0.5\n" for run in runs), seconds=60)
        assert len(task.env["CUDA_VISIBLE_DEVICES"].split(",")) == 2
        self.trained.append(f"{runs[0]}/{task.attempt}")
        return Ran(code=int(runs[0] == "bad" or (runs[0] == "flaky" and task.attempt == 1)), seconds=3600)


def test_runs_wait_for_each_other_and_bad_ones_are_left_out() -> None:
    async def scene() -> None:
        programs = Programs()
        async with AsyncClient(transport=SimFleet("1x2xH100+1xL40S", script=programs)) as moorage:
            assert await train_and_rate(moorage, ["good", "flaky", "bad"]) == {"good": 0.5, "flaky": 0.5}
        assert sorted(programs.trained) == ["bad/1", "bad/2", "flaky/1", "flaky/2", "good/1"]

    clock = SimulatedClock()
    clock.run(scene())
    assert 5 * 3600 < clock.now_s < 6 * 3600  # five trainings of an hour, one after the other on two GPUs


def test_it_survives_a_scheduler_and_a_worker_that_die() -> None:
    async def scene() -> None:
        programs = Programs()
        fleet = SimFleet("2x2xH100+1xL40S", script=programs)
        async with AsyncClient(transport=fleet) as moorage:
            working = asyncio.create_task(train_and_rate(moorage, ["one", "two"]))
            await asyncio.sleep(600)
            await fleet.kill_worker("sim-0000")
            await fleet.kill_scheduler()
            assert await working == {"one": 0.5, "two": 0.5}
        assert len(programs.trained) == 3  # the one that was lost was trained again, the other was not

    SimulatedClock().run(scene())


def test_a_training_that_nobody_can_rate_is_told() -> None:
    async def scene() -> None:
        def script(task: Task) -> Ran:
            return Ran(code=int(task.argv[1] == "rate.py"), err="no such metric\n")

        async with AsyncClient(transport=SimFleet("1x2xH100+1xL40S", script=script)) as moorage:
            with pytest.raises(JobFailed) as failed:
                await train_and_rate(moorage, ["one"])
            assert "no such metric" in failed.value.log_tail

    SimulatedClock().run(scene())
