"""A command in a running job: what is refused and why, the act in the record, and the order that goes to the worker."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers.views import summary
from moorage.scheduler.core.events import Execute
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import Exec, ExecAsked
from tests.unit.scheduler.driving import Driving

CAN = {"noop": Capabilities(execs=True, freezes=True)}
STREAM = "5e55" * 8


@pytest.fixture
def drive() -> Driving:
    return Driving()


def executed(drive: Driving, job: str = "j", *argv: str, **more: Any) -> dict[str, Any]:
    """The answer to `exec`."""
    tenant = more.pop("tenant", "t")
    asked = ExecAsked(job, list(argv or ["nvidia-smi", "-L"]), by="ana", **more)
    drive.engine.offer(Execute(tenant, asked, STREAM, "exec", True))
    drive.tick()
    answer: dict[str, Any] = drive.answers.pop("exec")
    return answer


def orders(drive: Driving) -> list[Exec]:
    return [order for frame in drive.wanted for order in frame.execs]


def test_a_command_is_recorded_told_and_ordered_once(drive: Driving) -> None:
    drive.worker("w0", 2, capabilities=CAN)
    drive.submit("j", gpu={}, replicas=2)
    drive.settle()
    answer = executed(drive, "j", "sh", "-c", "echo $HOME", replica=1, tty=True, term="vt100")
    assert answer["data"] == {"job": "j", "replica": 1, "attempt": 1, "worker": "w0", "stream": STREAM}
    assert answer["ledger"] == len(drive.records), "the answer comes behind the act"
    assert summary(drive.engine, drive.job("j")).why == "", "the words of a user are no reason of the scheduler"
    attempt = drive.attempt("j", 1)
    assert orders(drive) == [
        Exec("t", "j", 1, 1, attempt.fence, STREAM, ["sh", "-c", "echo $HOME"], tty=True, term="vt100")
    ]
    change = changes_since(drive.state, drive.job("j"), 0)[-1]
    assert (change.state, change.by, change.said) == ("EXEC", "tenant:t", "ana")
    assert change.why == "replica 1: sh -c 'echo $HOME'"
    drive.renew("w0")
    drive.tick()
    assert orders(drive) == [], "it is never sent again"


def test_a_program_in_an_argument_is_one_line_of_the_history(drive: Driving) -> None:
    drive.worker("w0", 1, capabilities=CAN)
    drive.submit("j", gpu={})
    drive.settle()
    executed(drive, "j", "python3", "-c", "# moorage forward 80\nimport socket")
    assert changes_since(drive.state, drive.job("j"), 0)[-1].why == "python3 -c '# moorage forward 80…"


@pytest.mark.parametrize(
    ("phase", "found"),
    [("waits", "QUEUED"), ("frozen", "FROZEN"), ("ends", "CANCELLING"), ("over", "SUCCEEDED")],
)
def test_what_does_not_run_is_refused(drive: Driving, phase: str, found: str) -> None:
    if phase != "waits":
        drive.worker("w0", 1, capabilities=CAN)
    drive.submit("j", gpu={}, on_no_match="wait")
    drive.settle()
    if phase == "frozen":
        drive.order("freeze", job="j")
        drive.settle()
    elif phase == "ends":
        drive.cancel("j")
    elif phase == "over":
        drive.run_out("w0")
        drive.settle()
    answer = executed(drive)
    assert (answer["code"], answer["found"]) == ("failed-precondition", found)
    assert not orders(drive)
    assert "EXEC" not in {change.state for change in changes_since(drive.state, drive.job("j"), 0)}


def test_each_replica_that_does_not_run_is_told_by_its_own_state(drive: Driving) -> None:
    drive.worker("w0", 2, capabilities=CAN)
    drive.submit("j", gpu={}, replicas=3)
    drive.settle()
    for replica in (0, 1):
        worker = drive.workers["w0"]
        worker.finish(next(key for key in worker.held if key[2] == replica), 9 * replica)
    drive.settle()
    assert executed(drive, replica=0)["message"] == "replica 0 of job j is not running: SUCCEEDED"
    assert executed(drive, replica=1)["message"] == "replica 1 of job j is not running: FAILED"
    drive.run_out("w0")
    assert drive.job("j").state == "FAILED"
    assert executed(drive, replica=0)["message"] == "replica 0 of job j is not running: SUCCEEDED"


def test_unknown_jobs_replicas_and_other_tenants_are_not_found(drive: Driving) -> None:
    drive.worker("w0", 1, capabilities=CAN)
    drive.submit("j", gpu={})
    drive.settle()
    assert executed(drive, "none")["code"] == "not-found"
    assert executed(drive, "j", replica=1)["message"] == "job j has no replica 1"
    assert executed(drive, "j", tenant="other")["code"] == "not-found"


def test_a_driver_that_runs_no_commands_is_refused_with_what_to_do(drive: Driving) -> None:
    drive.worker("w0", 1, capabilities={"noop": Capabilities(exec_instead="ask its owner")})
    drive.submit("j", gpu={})
    drive.settle()
    answer = executed(drive)
    assert answer["message"] == "no command can be run in job j: the driver noop of worker w0 runs none"
    assert answer["next"] == "ask its owner"
    assert not orders(drive)


def test_a_record_with_a_command_in_no_replica_of_the_job_is_refused(drive: Driving) -> None:
    drive.worker("w0", 1, capabilities=CAN)
    drive.submit("j", gpu={})
    drive.settle()
    act = acts.Exec(drive.job("j").num, 7, "tenant t", "true")
    record = Record(1, drive.state.epoch, 1, 9, drive.now, drive.state.digest, [], [], [], [], [act])
    with pytest.raises(FoldError, match="replica 7, which it has not"):
        fold(drive.state, record, drive.state.seq + 1)
