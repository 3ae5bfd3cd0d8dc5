"""A refusal of NATS comes with advice for this user."""

from __future__ import annotations

import pytest

from moorage.cli.framework import options
from moorage.cli.framework.codes import fix_of_end
from moorage.client.errors import NotPermitted
from moorage.client.tenant import TENANT_VARIABLE
from moorage.schemas.errors import Problem


@pytest.mark.parametrize(
    ("subject", "advice"),
    [
        (
            "$js.api.stream.msg.get.obj_moorage_files_vision",
            "moorage admin nats-config, without --shared and --no-results",
        ),
        ("moorage.api.speech.submit", "this key is tenant vision's: --tenant vision"),
    ],
)
def test_files_of_ones_own_tenant_want_a_right_and_not_another_tenant(
    monkeypatch: pytest.MonkeyPatch, subject: str, advice: str
) -> None:
    """`--with` was answered "this key is tenant vision's: --tenant vision" to that very tenant."""
    monkeypatch.setattr(options, "whose_key", lambda _: ("submitter", "vision"))
    monkeypatch.setenv(TENANT_VARIABLE, "vision" if subject.startswith("$") else "speech")
    error = NotPermitted(Problem("permission-refused", f"this NATS user may not publish to {subject}"))
    told = options._refused(options.Options(), error)
    assert advice in told.problem.next


@pytest.mark.parametrize(
    ("why", "fix"),
    [
        ("no program 'echo hi' in PATH /bin; it is one word: leave the quotes out, or use sh -c", "sh -c 'LINE'"),
        ("./bare.sh has no first line as #!/bin/sh, or is for another processor", "run it as sh NAME"),
        ("no program nosuch in PATH /bin", "bring it with --with"),
        ("no secret hf-token", "mend what the message names"),
    ],
)
def test_what_a_host_lacks_has_its_own_fix(why: str, fix: str) -> None:
    assert fix in fix_of_end(f"not-here: {why} (refused by w1)")
