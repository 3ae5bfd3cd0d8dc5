"""What drivers can do goes from the join to `fleet` and `show`."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.client.answers import JobInfo
from moorage.client.reading import as_struct
from moorage.scheduler.answers import views
from moorage.schemas.capabilities import DRIVER_DEFAULT, UNKNOWN, Capabilities
from tests.unit.scheduler.driving import Driving, wire

#: keys as the driver of another package might have
CAN = Capabilities(keeps_output=True, fence="supervisor", config=["times"])


def shown(drive: Driving, job: str) -> JobInfo:
    return as_struct(JobInfo, wire(views.show(drive.engine, "t", job)))


def test_fleet_and_show_carry_what_the_join_told() -> None:
    drive = Driving.with_hosts(1, drivers=["process", "parrot"], capabilities={"parrot": CAN})
    drive.worker("untold", capabilities={})
    drive.submit("said", run={"driver": "parrot", "argv": ["hello"]})
    drive.submit("untold", run={"argv": ["true"]})
    rows = {row.worker: row.capabilities for row in views.fleet(drive.engine, drive.now).workers}
    assert rows == {"w0": {"parrot": msgspec.to_builtins(CAN)}, "untold": {}}
    assert shown(drive, "said").capabilities == CAN
    assert shown(drive, "untold").capabilities is None, "its worker told nothing"
    assert shown(drive, "untold").driver == DRIVER_DEFAULT


def test_capabilities_of_a_later_release_and_of_none_can_be_read() -> None:
    def read(**found: Any) -> Capabilities | None:
        return as_struct(JobInfo, {"job": "j", "tenant": "t", "state": "RUNNING", **found}).capabilities

    assert read(capabilities={"keeps_output": True, "flies": True}) == Capabilities(keeps_output=True)
    assert read(capabilities={"keeps_output": "perhaps"}) is None
    assert read(capabilities={}) == UNKNOWN
    assert read() is None
