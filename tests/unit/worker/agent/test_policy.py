"""What a worker lets tenants do: drivers, programs, users; and the settings that cannot be."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.job import Request, Run, Secret
from moorage.worker.drivers.policy import Policy
from moorage.worker.settings import TENANTS_MAX, settings_from


def policy(**settings: Any) -> Policy:
    return Policy.of(settings_from({"state_dir": "/nowhere", **settings}))


def run(*argv: str, **fields: Any) -> Run:
    return Run(argv=list(argv), **fields)


def test_without_rules_everything_is_permitted() -> None:
    free = policy()
    free.check_host()
    free.check_placement("acme", Request(run=run("true")))
    free.check_program("acme", run("./anything", env={"LD_PRELOAD": "/x"}, user="1"))
    assert free.user_of("acme") is None


ROOT = [
    ({}, None, True, True),
    ({}, "0", True, True),
    ({}, "root", True, True),
    ({}, "65534", True, False),
    ({"run_as": "root"}, None, True, True),
    ({"run_as": "65534"}, None, False, False),
    ({"run_as_for": {"acme": "65534"}}, None, False, False),
    ({"run_as_for": {"acme": "65534", "*": "0"}}, None, True, False),
    ({"run_as_for": {"acme": "0"}, "run_as": "65534"}, None, True, True),
]


@pytest.mark.parametrize(("settings", "user", "is_open", "is_root"), ROOT)
def test_jobs_as_root_are_known_and_can_be_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], user: str | None, is_open: bool, is_root: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    asked = run("true", user=user)
    assert policy(**settings).leaves_root_open == is_open
    policy(**settings).check_root("acme", asked)
    strict = policy(**settings, root_jobs="refuse")
    assert not strict.leaves_root_open
    with pytest.raises(Refused, match="would run as root") if is_root else contextlib.nullcontext():
        strict.check_root("acme", asked)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not policy(**settings).leaves_root_open
    strict.check_root("acme", asked)


def test_drivers_by_tenant_and_for_all_others() -> None:
    some = policy(drivers_for={"acme": "process", "*": "noop other"})
    some.check_placement("acme", Request(run=run("true")))
    some.check_placement("beta", Request(run=run("true", driver="noop")))
    for tenant, driver in (("acme", "noop"), ("beta", "process")):
        with pytest.raises(Refused, match=f"tenant {tenant} may not have the driver {driver}") as caught:
            some.check_placement(tenant, Request(run=run("true", driver=driver)))
        assert caught.value.code == "not-permitted"
        assert caught.value.problem.allowed
    with pytest.raises(Refused):  # who is not named, where only others are
        policy(drivers_for={"acme": "process"}).check_placement("beta", Request(run=run("true")))


def test_drivers_alone_are_told_and_only_what_a_join_has_room_for() -> None:
    assert policy(programs_for={"acme": "sh"}, run_as_for={"acme": "7"}).drivers_by_tenant() == {}
    assert policy(drivers_for={"acme": "process noop", "*": ""}).drivers_by_tenant() == {
        "acme": ["noop", "process"],
        "*": [],
    }
    many = {f"tenant-{number}": "process" for number in range(TENANTS_MAX)}
    assert policy(drivers_for=many).drivers_by_tenant() == {}, "the scheduler finds out by being refused"
    with pytest.raises(Refused):
        policy(drivers_for=many).check_placement("beta", Request(run=run("true")))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, {}),
        ({"run_as": "65534"}, {"*": 0}),
        ({"run_as_for": {"a": "65534", "b": "nobody", "c": "0"}}, {"a": 0, "b": 0, "c": 1}),
        ({"run_as_for": {"a": "0", "b": "65534"}, "run_as": "nobody"}, {"*": 0, "a": 1}),
        ({"run_as_for": {"a": "0", "b": "65534", "*": "0"}, "run_as": "65534"}, {"*": 0, "b": 1}),
    ],
)
def test_users_are_told_as_numbers_and_those_of_all_others_by_one(settings: Any, told: dict[str, int]) -> None:
    assert policy(**settings).mps_users() == told


def test_of_more_tenants_than_a_join_has_room_for_no_user_is_told() -> None:
    many = {f"a-tenant-of-a-longer-name-{number}": str(number) for number in range(TENANTS_MAX)}
    assert policy(run_as_for=many).mps_users() is None


@pytest.mark.parametrize(
    ("program", "may"),
    [
        ("/opt/jobs/train", True),
        ("/opt/jobs/deep/train", True),
        ("python3", True),
        ("/usr/bin/python3", False),
        ("/opt/jobs/../../bin/sh", False),
        ("/opt/jobs//train", False),
        ("opt/jobs/train", False),
        ("./python3", False),
        ("python", False),
        ("sh", False),
        ("/bin/sh", False),
    ],
)
def test_programs_are_whole_paths_or_bare_names(program: str, may: bool) -> None:
    some = policy(programs_for={"acme": "/opt/jobs/* python3"})
    if may:
        some.check_program("acme", run(program))
    else:
        with pytest.raises(Refused, match=r"not-permitted: tenant acme may not start .* \(allowed: /opt/jobs/\*"):
            some.check_program("acme", run(program))
    with pytest.raises(Refused, match="tenant beta"):
        some.check_program("beta", run(program))


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "TF_LD_PRELOAD", "TF_PREPEND_LD_PRELOAD", "GCONV_PATH", "BASH_ENV"],
)
def test_an_allowed_program_is_not_made_another_by_the_loader(name: str) -> None:
    some = policy(programs_for={"*": "/opt/jobs/*"})
    with pytest.raises(Refused, match=f"may not set {name}"):
        some.check_program("acme", run("/opt/jobs/train", env={name: "/tmp/mine.so"}))


@pytest.mark.parametrize("name", ["PATH", "TF_PATH", "TF_PREPEND_PATH"])
def test_a_bare_name_is_not_looked_for_where_the_request_says(name: str) -> None:
    some = policy(programs_for={"*": "python3 /opt/jobs/*"})
    with pytest.raises(Refused, match=f"may not set {name}"):
        some.check_program("acme", run("python3", env={name: "/tmp"}))
    some.check_program("acme", run("/opt/jobs/train", env={name: "/tmp"}))


def test_a_tenant_names_its_own_secrets_alone() -> None:
    env: dict[str, str | Secret] = {"SEED": "7", "TOKEN": Secret(secret="acme-hf")}
    policy(run_as_for={"acme": "41001"}).check_secrets("beta", env)  # without the setting as ever
    some = policy(secrets_for={"acme": "acme-* shared", "*": "shared"})
    some.check_secrets("acme", env)
    some.check_secrets("beta", {"TOKEN": Secret(secret="shared"), "SEED": "7"})
    for tenant, name in (("beta", "acme-hf"), ("acme", "beta-hf"), ("acme", "Shared"), ("acme", "")):
        with pytest.raises(Refused, match=f"not-permitted: tenant {tenant} may not have the secret {name}"):
            some.check_secrets(tenant, {"SEED": "7", "TOKEN": Secret(secret=name)})
    with pytest.raises(Refused):  # who is not named, where only others are
        policy(secrets_for={"acme": "*"}).check_secrets("beta", env)


def test_secrets_that_all_tenants_may_name_are_noticed_where_tenants_are_told_apart() -> None:
    apart = {"run_as_for": {"acme": "41001"}}
    assert policy(**apart).leaves_secrets_open
    assert not policy(**apart, secrets_for={"*": ""}).leaves_secrets_open
    assert not policy().leaves_secrets_open


def test_a_tenants_user_is_the_workers_to_say() -> None:
    some = policy(run_as="65534", run_as_for={"acme": "41001"})
    assert (some.user_of("acme"), some.user_of("beta")) == ("41001", "65534")
    some.check_program("acme", run("true", user="41001"))
    for user in ("0", "root", "41002"):
        with pytest.raises(Refused, match="jobs of tenant acme run as 41001"):
            some.check_program("acme", run("true", user=user))


@pytest.mark.parametrize("user", [None, "0", "41001"])
def test_a_tenant_without_a_user_has_no_jobs_where_users_are_set_by_tenant(user: str | None) -> None:
    some = policy(run_as_for={"acme": "41001"})
    for check in (some.check_user, some.check_program):
        check("acme", run("true"))
        with pytest.raises(Refused, match="no user is set for jobs of tenant beta"):
            check("beta", run("true", user=user))
    policy(run_as="65534").check_user("beta", run("true"))


def test_users_need_root_and_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    policy(run_as="41001").check_host()
    with pytest.raises(Refused, match="run_as_for names the user nobody-of-that-name"):
        policy(run_as_for={"acme": "nobody-of-that-name"}).check_host()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(Refused, match="need an agent that runs as root"):
        policy(run_as="41001").check_host()


@pytest.mark.parametrize(
    "settings",
    [
        {"drivers_for": {"A.b": "process"}},
        {"programs_for": {"": "true"}},
        {"secrets_for": {"A.b": "hf"}},
        {"run_as_for": {"acme": " "}},
        {"run_as_for": {f"t{number}": "1" for number in range(TENANTS_MAX + 1)}},
    ],
)
def test_rules_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        settings_from({"state_dir": str(Path("/nowhere")), **settings})
