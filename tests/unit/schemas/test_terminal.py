"""What a request and a question say of a job's own terminal."""

from __future__ import annotations

import msgspec
import pytest

from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import ExecAsked
from moorage.schemas.job import Request


def request(driver: str) -> Request:
    return msgspec.convert({"run": {"argv": ["sh"], "stdin": "stream", "driver": driver}}, Request)


def test_a_driver_without_terminals_is_refused_one() -> None:
    assert request("process").trouble is None
    assert request("vm").trouble is None, "of drivers that are not known here, their workers say it"
    fault = request("vm").driver_fault(Capabilities(execs=True))
    assert fault is not None
    assert (fault.code, fault.trouble.field) == ("invalid-argument", "run.stdin")
    fault = request("vm").driver_fault(Capabilities(exec_instead="run sshd in the guest"))
    assert fault is not None
    assert fault.trouble.message.endswith("a caller holds: run sshd in the guest"), "it says what to do instead"
    assert request("podman").driver_fault(Capabilities(holds_stdin=True)) is None
    trouble = request("noop").trouble
    assert trouble is not None
    assert trouble.message == "jobs of the driver noop have no terminal that a caller holds"


@pytest.mark.parametrize("more", [{"argv": ["sh"]}, {"tty": True}, {"term": "vt100"}])
def test_a_terminal_is_held_without_a_command(more: dict[str, object]) -> None:
    assert msgspec.convert({"job": "j", "argv": [], "attach": True}, ExecAsked).attach
    with pytest.raises(msgspec.ValidationError, match="leave them out"):
        msgspec.convert({"job": "j", "argv": [], "attach": True, **more}, ExecAsked)
