"""The right to run commands in jobs, on the real server: whose key asks, and who publishes and hears the bytes.

The table is written by hand from the contract, not read from the code that makes the configuration.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from moorage.client.job import AsyncJob
from tests.sites import running
from tests.system.cli.node import moorage
from tests.system.deploy.rights import wrong_rights
from tests.system.deploy.test_roles_live import everybody
from tests.waiting import until

LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "account-per-tenant": {},
    "shared-account": {"shared": True},
    "cluster": {"servers": 3},
}
#: those that act, by short names; acme has the right, beta has not
WHO: Final = {
    "acme": "submitter.acme",
    "beta": "submitter.beta",
    "serves": "service.acme",
    "w1": "worker.w1",
    "w2": "worker.w2",
    "ana": "operator.ana",
    "graf": "observer.graf",
    "sched": "scheduler.main",
}
STREAM: Final = "5e55105e55105e55105e55105e55105e"
#: subject: who publishes to it, who subscribes to it
TABLE: Final[dict[str, tuple[str, str]]] = {
    "moorage.api.acme.exec": ("acme", "sched"),
    "moorage.api.beta.exec": ("", "sched"),
    "moorage.api.beta.show": ("beta ana", "sched"),
    f"moorage.tty.acme.w1.{STREAM}.in": ("acme", "w1"),
    f"moorage.tty.acme.w1.{STREAM}.out": ("w1", "acme"),
    f"moorage.tty.acme.w2.{STREAM}.in": ("acme", "w2"),
    f"moorage.tty.acme.w2.{STREAM}.out": ("w2", "acme"),
    f"moorage.tty.beta.w1.{STREAM}.in": ("", "w1"),
    f"moorage.tty.beta.w1.{STREAM}.out": ("w1", ""),
    f"moorage.tty.acme.w1.{STREAM}.other": ("", ""),
    f"moorage.tty.acme.w1.{STREAM}": ("", ""),
    f"moorage.tty.acme.w1.x.{STREAM}.in": ("", ""),
    "moorage.tty.acme": ("", ""),
}
WIDE: Final = ("moorage.tty.>", "moorage.tty.*.*.*.*", "moorage.tty.*.*.*.in", "moorage.tty.*.*.*.out")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_only_a_tenant_with_the_right_and_the_worker_exchange_bytes(layout: str) -> None:
    async with running(**LAYOUTS[layout], execs=("acme",)) as site:
        wrong = await wrong_rights(site, WHO, dict.fromkeys(WHO, TABLE), WIDE)
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
async def test_a_tenant_with_the_right_runs_commands_and_another_is_told_how_to_get_it(shared: bool) -> None:
    async with everybody(shared=shared, execs=("acme",)) as made:
        for tenant in ("acme", "beta"):
            async with made.client(f"submitter.{tenant}", tenant) as client:
                job = await client.submit(["sleep", "600"], job="j", gpu="1")

                async def runs(job: AsyncJob = job) -> bool:
                    return (await job.show()).state == "RUNNING"

                await until(runs, 90.0, "the job runs")
        words = ("--", "sh", "-c", "cat; exit 3")
        env = dict(made.site.environment)
        ran = await moorage("exec", "j", "--nats", "submitter.acme", "--tenant", "acme", *words, env=env, stdin="mine")
        assert (ran.code, ran.out, ran.err) == (3, "mine", "")
        ran = await moorage("exec", "j", "--nats", "submitter.beta", "--tenant", "beta", *words, env=env)
        assert "those who run this fleet give that right with moorage admin nats-config --exec beta" in ran.err
        ran = await moorage("exec", "j", "--nats", "submitter.beta", "--tenant", "acme", *words, env=env)
        assert ran.code != 0
