"""A supervisor that is full refuses a member, and names the bound that it has reached."""

from pathlib import Path

import pytest

from moorage.worker.supervisor import jobs
from moorage.worker.supervisor.launcher_client import Launcher
from moorage.worker.supervisor.protocol import Ended, Event, StartMember


@pytest.mark.parametrize(("bound", "message"), [("RUNNING_MAX", "runs 0 members"), ("HELD_MAX", "holds 0 members")])
async def test_a_member_beyond_a_bound_is_told_which_one_it_was(
    bound: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, bound, 0)
    events: list[Event] = []
    full = jobs.Jobs(
        state=tmp_path,
        state_mark="",
        boot_id="boot",
        cgroups=None,
        fences=None,
        descriptors=(64, 64),
        emit=events.append,
        record=lambda record: None,
        write_ahead=lambda records: None,
        launcher=Launcher(),
    )
    full.start((StartMember(key="one", argv=("true",), env={}),))
    [ended] = events
    assert isinstance(ended, Ended)
    assert (ended.reason, ended.message) == ("start-failed", f"the supervisor {message}")
