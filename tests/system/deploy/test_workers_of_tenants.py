"""A worker that serves some tenants alone: its key writes and hears nothing of any other tenant."""

from __future__ import annotations

from collections import defaultdict

import pytest

from moorage.bus.errors import BusError, PermissionRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import files_store
from moorage.bus.passed_on import through_schedulers
from moorage.schemas.subjects import Subjects
from tests.sites import running, settled

#: what a worker may publish for a tenant; then what it may hear
SAID = (
    "moorage.log.{0}.job-1.0",
    "moorage.tty.{0}.w2.5e55.out",
    "moorage.worker.w2.fetch.DIRECT.GET.OBJ_MOORAGE_FILES_{0}",
    "moorage.worker.w2.fetch.STREAM.MSG.GET.OBJ_MOORAGE_CHECKPOINTS_{0}",
    "moorage.worker.w2.fetch.STREAM.INFO.OBJ_MOORAGE_CHECKPOINTS_{0}",
    "moorage.worker.w2.fetch.DIRECT.GET.OBJ_MOORAGE_SCHEDULES_{0}",
    "moorage.worker.w2.store.MOORAGE_FILES_{0}.C.x",
    "moorage.worker.w2.store.MOORAGE_CHECKPOINTS_{0}.M.x",
    "moorage.worker.w2.result.MOORAGE_RESULT_{0}.C.x",
)
HEARD = ("moorage.tty.{0}.w2.5e55.in",)
#: what is no tenant's
OWN = (
    "moorage.hello.w2",
    "moorage.load.w2",
    "moorage.worker.w2.join",
    "moorage.worker.w2.renew",
    "moorage.worker.w2.fact",
)


async def test_a_worker_writes_and_hears_for_the_tenants_that_it_serves_alone() -> None:
    async with (
        running(tenants=("acme", "beta", "gamma"), serves={"w2": ("beta", "gamma")}) as site,
        await site.witness("MOORAGE") as users,
        await site.connect("worker.w1") as everybodys,
    ):
        refused: set[str] = set()

        def on_error(error: BusError) -> None:
            if isinstance(error, PermissionRefused):
                refused.add(error.subject)

        async with await site.connect("worker.w2", on_error=on_error) as worker:
            arrived: dict[bytes, str] = defaultdict(str)
            await users.subscribe("moorage.>", lambda delivery: arrived.__setitem__(delivery.data, delivery.subject))
            await settled(users)
            subjects = [form.format(tenant) for form in SAID for tenant in ("acme", "beta", "gamma")] + [*OWN]
            for subject in subjects:
                await worker.send([(subject, subject.encode(), "")])
                mine = subject.replace("w2", "w1")
                await everybodys.send([(mine, mine.encode(), "")])
            await settled(worker, everybodys, users)
            of_acme = {subject for subject in subjects if "acme" in subject}
            assert refused == {subject.lower() for subject in of_acme}
            assert {each for each in arrived.values() if "w1" not in each} >= {*subjects} - of_acme
            assert not of_acme & {*arrived.values()} - {"moorage.log.acme.job-1.0"}, "only the other worker says that"
            assert {subject.replace("w2", "w1") for subject in subjects} <= {*arrived.values()}
            files = files_store(JetStream(through_schedulers(worker, "moorage")), Subjects(), "acme")
            with pytest.raises(PermissionRefused) as told:
                await files.find("x")
            assert "worker w2 is not for that tenant" in told.value.problem.next
            assert "--worker w2=TENANT" in told.value.problem.next
            for tenant in ("beta", "gamma"):
                for form in HEARD:
                    await worker.subscribe(form.format(tenant), lambda _: None)
            for wide in ("moorage.tty.acme.w2.5e55.in", "moorage.tty.*.w2.*.in"):
                try:
                    await worker.subscribe(wide, lambda _: None)
                    raise AssertionError(wide)
                except PermissionRefused:
                    pass
