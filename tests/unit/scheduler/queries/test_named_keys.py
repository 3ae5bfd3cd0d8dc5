"""Every key of the scheduler's answers about jobs is a field of their structs, and so stands on the protocol page."""

from __future__ import annotations

from moorage.scheduler.answers import views
from moorage.scheduler.answers.listing import Reasons, row_of
from moorage.schemas.answers.jobs import JobRow, ShownJob
from tests.unit.scheduler.driving import Driving
from tests.unit.schemas.struct_names import unnamed

JOBS = ("runs", "waits", "held", "behind", "ended", "many")


def test_keys_of_show_and_ls_are_fields() -> None:
    drive = Driving()
    drive.worker("w0", gpus=4)
    drive.submit("ended", gpu={}, labels={"sweep": "lr"})
    drive.settle()
    drive.run_out("w0")
    drive.submit("runs", gpu={"count": 2}, run={"argv": ["true"], "ready": {"tcp": 1}})
    drive.submit("many", gpu={"count": 1}, replicas=3)
    drive.settle()
    drive.submit("waits", gpu={"model": "H999"})
    drive.submit("held", gpu={"count": 4})
    drive.order("hold", job="held", why="maintenance")
    drive.submit("behind", gpu={}, after=["waits"])
    drive.settle()
    for name in JOBS:
        shown = views.show(drive.engine, "t", name)
        assert isinstance(shown, dict)
        assert list(unnamed(shown, ShownJob)) == []
        row = row_of(drive.engine, drive.job(name), Reasons(drive.engine))
        assert list(unnamed(row, JobRow)) == []
        assert list(unnamed(row | {"made_up": 1}, JobRow)) == ["$.made_up"]
