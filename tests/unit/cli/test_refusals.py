"""A refusal of NATS comes with advice for this user."""

from __future__ import annotations

import pytest

from moorage.bus.errors import NotAuthorized, PermissionRefused
from moorage.cli import main
from moorage.cli.framework import options
from moorage.cli.framework.codes import fix_of_end
from moorage.cli.framework.exit_codes import EXIT_USAGE
from moorage.cli.jobs.plan import quotas_of, shares_of
from moorage.client.errors import NotPermitted, Rejected
from moorage.client.tenant import TENANT_VARIABLE
from moorage.schemas.errors import Problem
from moorage.schemas.roles import RIGHTS_ANEW, has_right


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
    ("key", "subject", "advice"),
    [
        (("submitter", "vision"), "moorage.api.vision.exec", "moorage admin nats-config --exec vision"),
        (("submitter", "vision"), "moorage.api.speech.ls", "this key is tenant vision's: --tenant vision"),
        (("operator", "ana"), "moorage.log.default.j1.*", "this key is an operator's, and this takes a tenant's"),
        (("operator", "ana"), "moorage.api.vision.submit", "this key is an operator's, and this takes a tenant's"),
        (("worker", "n01"), "moorage.api.default.ls", "this key is a worker's, and this takes a tenant's"),
        (("observer", "wall"), "moorage.events.default", "this key is an observer's, and this takes a tenant's"),
        (("observer", "wall"), "moorage.event.default.j1", "this key is an observer's, and this takes a tenant's"),
        (("observer", "wall"), "moorage.call.default.echo", "this key is an observer's, and this takes a tenant's"),
        (("observer", "wall"), "moorage.admin._.drain", "this key is an observer's, and this takes an operator's"),
        (("observer", "wall"), "moorage.events._fleet", "this key is an observer's, and this takes an operator's"),
        (("observer", "wall"), "moorage.fleet.detail", "this key is an observer's, and this takes an operator's"),
        (("worker", "n01"), "moorage.fleet.frame", "this key is a worker's, and this takes an operator's"),
        (("submitter", "vision"), "moorage.events._fleet", "this key is tenant vision's, and this takes an operator's"),
        (("submitter", "vision"), "moorage.fleet.frame", "this key is tenant vision's, and this takes an operator's"),
        (("service", "vision"), "moorage.api.vision.ls", "this key is a service's, and this takes a tenant's"),
    ],
)
def test_the_advice_is_of_the_key_where_no_tenant_is_named(
    monkeypatch: pytest.MonkeyPatch, key: tuple[str, str], subject: str, advice: str
) -> None:
    """`exec` without its right was answered "--tenant vision" to that very tenant, and `run` with an operator's key
    "name your tenant", and with that "give the user's role that permission"."""
    monkeypatch.setattr(options, "whose_key", lambda _: key)
    monkeypatch.delenv(TENANT_VARIABLE, raising=False)
    error = NotPermitted(Problem("permission-refused", f"this NATS user may not publish to {subject}"))
    assert advice in options._refused(options.Options(), error).problem.next


def test_a_key_with_rights_of_an_earlier_release_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """`usage` with an operator's key was answered that it takes a tenant's."""
    monkeypatch.setattr(options, "whose_key", lambda _: ("operator", "ana"))
    monkeypatch.delenv(TENANT_VARIABLE, raising=False)
    for subject in ("moorage.api.vision.usage", "moorage.api.default.explain"):
        assert has_right("_INBOX.operator.ana", "publish", subject)
        error = NotPermitted(PermissionRefused("publish", subject, RIGHTS_ANEW).problem)
        assert options._refused(options.Options(), error).problem.next == RIGHTS_ANEW


def test_a_command_with_a_key_that_was_revoked_says_so_and_asks_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    """It said that no scheduler answers."""
    client = options.client_of(options.Options(nats="nats://h1:4222"))
    client._wire._on_error(NotAuthorized("nats://h1:4222", "'Authorization Violation'"))
    on_wait = client._wire._asking._on_wait
    assert on_wait is not None
    on_wait()
    said = capsys.readouterr().err
    assert said.startswith("not now, not-authorized: NATS at nats://h1:4222 refused these credentials"), said
    assert "asks again" not in said


@pytest.mark.parametrize(
    ("why", "fix"),
    [
        ("no program 'echo hi' in PATH /bin; it is one word: leave the quotes out, or use sh -c", "sh -c 'LINE'"),
        ("./bare.sh has no first line as #!/bin/sh, or is for another processor", "run it as sh NAME"),
        ("no program nosuch in PATH /bin", "bring it with --with"),
        ("secret 'hf': the worker's folder of secrets (secrets_dir) is missing, or others", "moorage worker --secrets"),
        ("secret 'hf': there is no such file in the worker's folder of secrets", "put a file of that name there"),
        ("no secret hf-token", "mend what the message names"),
    ],
)
def test_what_a_host_lacks_has_its_own_fix(why: str, fix: str) -> None:
    assert fix in fix_of_end(f"not-here: {why} (refused by w1)")


@pytest.mark.parametrize(
    "line", ["admin hold --queue --tenant=", "ls --nats=", "submit --tenant= -- true", "ls --timeout="]
)
def test_an_option_that_names_where_a_command_goes_is_not_empty(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a variable that was not set, the queue of the default tenant was put on hold."""
    assert main.run(line.split()) == EXIT_USAGE
    assert " is empty\n" in capsys.readouterr().err


def test_a_counter_and_its_number_are_two_words(capsys: pytest.CaptureFixture[str]) -> None:
    """With =, as in --uses, none of that name was found, and nothing set."""
    assert main.run(["admin", "counter", "matlab=2", "--nats", "nats://127.0.0.1:1"]) == EXIT_USAGE
    assert "fix: moorage admin counter matlab 2\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["a=1", "a=2"], ["a=1", "a=none"]])
def test_a_quota_or_share_of_one_tenant_is_given_once(words: list[str]) -> None:
    with pytest.raises(Rejected, match="the second of a"):
        quotas_of(words)
    with pytest.raises(Rejected, match="once for each tenant"):
        shares_of(["a=1", "a=2"])
