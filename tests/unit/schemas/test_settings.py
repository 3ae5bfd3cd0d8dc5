"""The settings file: which value holds, and what becomes of those that cannot be."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.cli.framework.settings import client_settings, effective, example_file, flags_of, sections, the_file
from moorage.scheduler.core.config import CLUSTER_DEFAULTS, Config
from moorage.scheduler.settings import SchedulerSettings, scheduler_settings
from moorage.schemas import settings_file
from moorage.schemas.errors import Refused
from moorage.schemas.settings import (
    DEFAULT,
    NO_FILE,
    SECTIONS,
    SettingsFile,
    as_words,
    declared,
    made,
    read_file,
    setting,
    settle,
    shown,
    unknown_variables,
)
from moorage.schemas.settings_file import OWN_FLEET_VARIABLE, find_file
from moorage.schemas.units import duration_s, size_bytes
from moorage.system.simulated_hosts import simulated_hosts
from moorage.worker.settings import WorkerSettings, worker_settings


class Own(msgspec.Struct, kw_only=True):
    copies: Annotated[int, setting("Copies.", of_site="always")] = 1
    user: Annotated[str, setting("User.", of_site="unprivileged")] = ""
    wait: Annotated[int, setting("Wait.")] = 1


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    keep: Annotated[float, setting("How long.", unit="s", ge=1, le=86400)] = 60.0
    room: Annotated[int, setting("How much.", unit="bytes", ge=1024, le=1 << 40)] = 1 << 30
    count: Annotated[int, setting("How many.", ge=1, le=10)] = 3
    is_on: Annotated[bool, setting("Whether.")] = True
    words: Annotated[tuple[str, ...], setting("Which.")] = ("a",)
    numbers: Annotated[tuple[int, ...] | None, setting("Which numbers.")] = None
    names: Annotated[dict[str, str], setting("What is called what.")] = {}
    level: Annotated[Literal["low", "high"], setting("How loud.")] = "low"
    folder: Annotated[Path | None, setting("Where.", flag="in", env="TRIED_FOLDER")] = None
    server: Annotated[str | None, setting("Who.")] = None


def file_with(tmp_path: Path, text: str, name: str = "moorage.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    path.chmod(0o600)
    return path


def settled(tmp_path: Path, text: str = "", flags: Any = None, **env: str) -> Tried:
    file = read_file(file_with(tmp_path, "[worker]\n" + text))
    return made(Tried, settle("worker", Tried, flags=flags, env=env, file=file))


def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(tmp_path: Path) -> None:
    file = read_file(file_with(tmp_path, '[worker]\nkeep = "10m"\n'))
    env = {"MOORAGE_WORKER_KEEP": "20m"}
    flag = settle("worker", Tried, flags={"keep": "30m"}, env=env, file=file)["keep"]
    variable = settle("worker", Tried, flags={"keep": None}, env=env, file=file)["keep"]
    from_file = settle("worker", Tried, env={"MOORAGE_WORKER_KEEP": ""}, file=file)["keep"]
    default = settle("worker", Tried, env={})["keep"]
    assert [one.value for one in (flag, variable, from_file, default)] == [1800, 1200, 600, 60]
    assert [one.source for one in (flag, variable, from_file, default)] == [
        "--keep",
        "MOORAGE_WORKER_KEEP",
        str(file.path),
        DEFAULT,
    ]


def test_a_byte_order_mark_before_the_settings_is_skipped(tmp_path: Path) -> None:
    file = file_with(tmp_path, '\ufeff[worker]\r\nkeep = "10m"\r\n')
    assert made(Tried, settle("worker", Tried, env={}, file=read_file(file))).keep == 600


def test_values_of_every_kind_from_the_file_and_as_text(tmp_path: Path) -> None:
    from_file = settled(
        tmp_path,
        'keep = 90.5\nroom = "2GiB"\ncount = 4\nis_on = false\nwords = ["b", "c"]\nnumbers = [0, 2]\n'
        'names = { zone = "a" }\nlevel = "high"\nfolder = "/srv"\nserver = "nats://here"\n',
    )
    assert from_file == Tried(
        keep=90.5, room=2 << 30, count=4, is_on=False, words=("b", "c"), numbers=(0, 2), names={"zone": "a"},
        level="high", folder=Path("/srv"), server="nats://here",
    )  # fmt: skip
    as_text = settled(
        tmp_path,
        MOORAGE_WORKER_KEEP="90.5",
        MOORAGE_WORKER_ROOM="2147483648",
        MOORAGE_WORKER_COUNT="4",
        MOORAGE_WORKER_IS_ON="no",
        MOORAGE_WORKER_WORDS="b, c",
        MOORAGE_WORKER_NUMBERS="0,2",
        MOORAGE_WORKER_NAMES="zone=a",
        MOORAGE_WORKER_LEVEL="high",
        TRIED_FOLDER="/srv",
        MOORAGE_WORKER_SERVER="nats://here",
    )
    assert as_text == from_file
    by_flag = settled(tmp_path, flags={"names": ["zone=a", "rack=7"], "words": ["b,c", "d"], "is_on": False})
    assert (by_flag.names, by_flag.words, by_flag.is_on) == ({"zone": "a", "rack": "7"}, ("b", "c", "d"), False)


@pytest.mark.parametrize(
    ("line", "found", "allowed", "next_step"),
    [
        ("keep = -1", "-1", "a duration, 1s..1d", 'keep = "1m"'),
        ('keep = "soon"', "soon", "a duration, 1s..1d", 'keep = "1m"'),
        ('keep = "10GiB"', "10GiB", "a duration, 1s..1d", 'keep = "1m"'),
        ("keep = nan", "nan", "a duration, 1s..1d", 'keep = "1m"'),
        ("keep = true", "True", "a duration, 1s..1d", 'keep = "1m"'),
        ('room = "10m"', "10m", "a size, 1KiB..1TiB", 'room = "1GiB"'),
        ("room = 10.5", "10.5", "a size, 1KiB..1TiB", 'room = "1GiB"'),
        ("room = 1", "1", "a size, 1KiB..1TiB", 'room = "1GiB"'),
        ("count = 11", "11", "a whole number, 1..10", "count = 3"),
        ('count = "3"', "'3'", "a whole number, 1..10", "count = 3"),
        ('is_on = "yes"', "'yes'", "true or false", "is_on = true"),
        ('words = "a"', "'a'", "a list", 'words = ["a"]'),
        ("numbers = [0.5]", "0.5", "a list", "numbers = []"),
        ("names = [1]", "[1]", "a table", 'names = { … = "…" }'),
        ('level = "loud"', "loud", "low, high", 'level = "low"'),
        ("folder = 7", "7", "a path", 'folder = "/path/to/it"'),
    ],
)
def test_a_value_that_cannot_be_says_what_was_found_what_is_allowed_and_what_to_write(
    line: str, found: str, allowed: str, next_step: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as refused:
        settled(tmp_path, line)
    said = refused.value.problem
    key = line.partition(" ")[0]
    assert (said.code, said.field, said.allowed) == ("bad-settings", f"[worker] {key}", allowed)
    assert found in said.found
    assert str(tmp_path) in said.found
    assert next_step in said.next


@pytest.mark.parametrize(
    ("flags", "env", "next_step"),
    [
        ({"names": ["zone"]}, {}, "for example --names …=…"),
        ({"folder": ""}, {}, "for example --in /path/to/it"),
        ({}, {"MOORAGE_WORKER_KEEP": "soon"}, "for example MOORAGE_WORKER_KEEP=1m"),
        ({}, {"MOORAGE_WORKER_KEEP": "nan"}, "for example MOORAGE_WORKER_KEEP=1m"),
    ],
)
def test_a_bad_value_says_how_to_set_it_where_it_was_set(
    flags: dict[str, Any], env: dict[str, str], next_step: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as refused:
        settled(tmp_path, flags=flags, **env)
    assert refused.value.problem.next == next_step


def test_an_unknown_key_and_an_unknown_section_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no key 'kep'") as refused:
        settled(tmp_path, "kep = 3")
    assert refused.value.problem.next == "the nearest is keep"
    with pytest.raises(Refused, match="no section for 'worke'") as refused:
        read_file(file_with(tmp_path, "[worke]\n"))
    assert refused.value.problem.next == "the nearest is worker"
    assert refused.value.problem.allowed == "[scheduler], [worker], [up], [client], [driver.NAME]"
    with pytest.raises(Refused, match="must be a table"):
        read_file(file_with(tmp_path, "worker = 3\n"))


@pytest.mark.parametrize("name", SECTIONS)
def test_no_section_takes_an_unknown_key(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no key 'nonsense'"):
        the_file(file_with(tmp_path, f"[{name}]\nnonsense = 1\n"))


def test_a_key_of_another_section_is_told_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"\[worker\] has no key 'takeover_s'") as refused:
        the_file(file_with(tmp_path, "[worker]\ntakeover_s = 9\n"))
    assert refused.value.problem.next == "takeover_s is a setting of [scheduler]"


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path, why in (
        (tmp_path / "none.toml", "No such file"),
        (tmp_path, "Is a directory"),
        (file_with(tmp_path, "[worker\n", "torn.toml"), "not valid TOML"),
        (file_with(tmp_path, "# " + "x" * 300_000, "large.toml"), "too large"),
    ):
        with pytest.raises(Refused, match=why) as refused:
            read_file(path)
        assert refused.value.code == "bad-settings"
    (tmp_path / "raw.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match="not valid TOML"):
        read_file(tmp_path / "raw.toml")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is asked for more")
def test_root_reads_nothing_that_others_may_write(tmp_path: Path) -> None:
    path = file_with(tmp_path, "[worker]\n")
    read_file(path)
    path.chmod(0o606)
    with pytest.raises(Refused, match="others may write"):
        read_file(path)
    path.chmod(0o600)
    os.chown(path, 12345, 0)
    with pytest.raises(Refused, match="others may write"):
        read_file(path)


def test_no_password_stands_in_it(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="password or token") as refused:
        settled(tmp_path, 'server = "nats://ana:geheim@host:4222"')
    assert "geheim" not in str(refused.value.problem)
    assert settled(tmp_path, 'server = "nats://host:4222"').server == "nats://host:4222"
    for url in ("nats://ana:ge/heim@host:4222", "ana:geheim@host:4222"):
        file = read_file(file_with(tmp_path, f'[worker]\nnats = "{url}"\n'))
        with pytest.raises(Refused, match="password or token") as refused:
            worker_settings({}, tmp_path, file=file)
        assert "heim" not in str(refused.value.problem)


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    home, config, here = tmp_path / "home", tmp_path / "config", tmp_path / "here"
    of_user, of_config = home / ".config/moorage/moorage.toml", config / "moorage/moorage.toml"
    for path in (of_user, of_config):
        path.parent.mkdir(parents=True)
        path.write_text("")
    assert find_file(env={"HOME": str(home)}) == of_user
    assert find_file(env={"HOME": str(home), "XDG_CONFIG_HOME": str(config)}) == of_config
    assert find_file(env={"HOME": str(home), "MOORAGE_SETTINGS": "/named"}) == Path("/named")
    assert find_file("/given", env={"HOME": str(home), "MOORAGE_SETTINGS": "/named"}) == Path("/given")
    here.mkdir()
    (here / "moorage.toml").write_text("")
    before = Path.cwd()
    os.chdir(here)
    try:
        assert find_file(env={"HOME": str(here), "XDG_CONFIG_HOME": str(here / "none")}) != here / "moorage.toml"
    finally:
        os.chdir(before)


def test_every_key_has_a_word_of_help_a_flag_and_a_variable_of_its_own() -> None:
    for name, struct in sections().items():
        keys = declared(name, struct)
        assert len({one.flag for one in keys.values()}) == len(keys)
        assert len({one.env for one in keys.values()}) == len(keys)
        for one in keys.values():
            assert one.help.endswith("."), one
            assert re.fullmatch(r"--[a-z][a-z0-9-]*", one.flag)


def test_the_example_file_holds_every_default(tmp_path: Path) -> None:
    text = example_file()
    assert tomllib.loads(text) == {name: {} for name in SECTIONS}
    values = tomllib.loads(re.sub(r"(?m)^#(?=[a-z_]+ = )", "", text))
    for name, struct in sections().items():
        assert set(values[name]) == set(declared(name, struct))
    text = "\n".join(
        line[1:] if re.match(r"#[a-z_]+ = ", line) else line
        for line in text.splitlines()
        if not re.search(r"= (\"…\"|\"/path|\[\]|{)", line)
    )
    file = the_file(file_with(tmp_path, text))
    for name, struct in sections().items():
        for key, found in settle(name, struct, env={}, file=file).items():
            if found.source != DEFAULT and found.setting.default not in (None, "", (), {}):
                assert found.value == found.setting.default, (name, key)


def test_settings_that_do_not_go_together_name_their_sources(tmp_path: Path) -> None:
    file = read_file(file_with(tmp_path, '[scheduler]\nlease_s = "5s"\n'))
    with pytest.raises(Refused, match=r"lease_s must be above 10") as refused:
        scheduler_settings({}, env={}, file=file)
    assert str(file.path) in refused.value.problem.message
    with pytest.raises(Refused, match="ranker must be fragments, pack, headroom"):
        scheduler_settings({"ranker": "best"}, env={})
    with pytest.raises(Refused, match="id must match"):
        worker_settings({"id": "a.b"}, tmp_path, env={})


def test_of_settings_that_clash_each_is_named_and_what_to_change() -> None:
    with pytest.raises(Refused) as refused:
        scheduler_settings({"renew_s": "0.5s", "grace_s": "1s", "nats": "nats://127.0.0.1:1"}, env={})
    told = refused.value.problem
    assert told.message == (
        "these settings do not go together: heartbeat_s must be below renew_s = 0.5, found 1"
        " (heartbeat_s by default, renew_s from --renew-s)"
    )
    assert told.next == "give heartbeat_s (--heartbeat-s) or --renew-s another value"
    with pytest.raises(Refused) as refused:
        scheduler_settings({"lease_s": "5s", "grace_s": "1s"}, env={})
    assert refused.value.problem.next.startswith("give --lease-s or renew_s (--renew-s) or takeover_s")
    assert "grace" not in refused.value.problem.message


@pytest.mark.parametrize(
    ("given", "said", "fix"),
    [
        ({"modes": "foo"}, "modes must be exclusive, mps or time-slice, found 'foo' (modes from --modes)", "--modes"),
        (
            {"labels": "a b=c", "state_dir": "x"},
            "labels must have keys of 1..63 letters, digits and _./-, found 'a b' (labels from --label)",
            "--label",
        ),
        (
            {"auto_freeze": "true"},
            "these settings do not go together: auto_freeze needs limiter = true: without the limiter's library nothing"
            " resumes a job as it uses its GPUs again; set limiter = true, or take auto_freeze out (auto_freeze from"
            " --auto-freeze, limiter by default)",
            "--auto-freeze or limiter (--limiter)",
        ),
        ({"sharers_max": "mps=9"}, "sharers_max must be 0..8 for mps, found 9 (sharers_max from --sharers-max)", ""),
    ],
)
def test_an_error_names_the_settings_that_contradict_each_other_and_no_others(
    given: dict[str, str], said: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as refused:
        worker_settings(given, tmp_path, env={})
    assert (refused.value.problem.message, refused.value.problem.next) == (
        said, f"give {fix or '--sharers-max'} another value"
    )  # fmt: skip


def test_a_ranker_that_cannot_be_imported_is_the_only_setting_at_fault() -> None:
    with pytest.raises(Refused) as refused:
        scheduler_settings({"ranker": "no_such_module:Own", "grace_s": "1s"}, env={})
    told = refused.value.problem
    assert told.message.startswith("ranker: no_such_module:Own: there is no module 'no_such_module'")
    assert told.next == "give --ranker another value"


@pytest.mark.parametrize("name", ["n" * 129, "one\nline"])
def test_a_schedulers_name_fits_a_line(name: str) -> None:
    with pytest.raises(Refused, match="name must be at most 128 printable characters"):
        scheduler_settings({"name": name}, env={})
    assert scheduler_settings({"name": "n" * 128}, env={})[0].name == "n" * 128


@pytest.mark.parametrize("address", ["n07", "n07.rack-2.example", "10.0.0.7", "fe80::1%eth0", "2001:db8::7"])
def test_an_address_is_a_name_or_a_number(address: str, tmp_path: Path) -> None:
    assert worker_settings({"address": address, "interface": "eth0.100"}, tmp_path, env={})[0].address == address


@pytest.mark.parametrize("sharers", [{"mps": 9}, {"time-slice": -1}, {"exclusive": 1}, {"mp": 1}])
def test_sharers_are_within_what_a_mode_allows(tmp_path: Path, sharers: dict[str, int]) -> None:
    with pytest.raises(Refused, match="sharers_max must"):
        worker_settings({"sharers_max": sharers}, tmp_path, env={})


@pytest.mark.parametrize("kept", [{"-1": "mps"}, {"01": "mps"}, {"64": "mps"}, {"0": ""}, {"0": "mps"}, {"0": "whole"}])
def test_modes_that_a_device_is_kept_for_are_some_that_the_worker_offers(tmp_path: Path, kept: dict[str, str]) -> None:
    with pytest.raises(Refused, match="slot_modes must" if "0" in kept else "slot_modes must have positions"):
        worker_settings({"slot_modes": kept}, tmp_path, env={})
    offers = {"modes": ("exclusive", "mps"), "slot_modes": {"0": "exclusive mps", "63": "mps"}}
    assert worker_settings(offers, tmp_path, env={})[0].slot_modes == offers["slot_modes"]


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({"-1": "tier=fast"}, "slot_labels must have positions 0..63 as keys, found '-1'"),
        ({"gpu0": "tier=fast"}, "slot_labels must have positions 0..63 as keys, found 'gpu0'"),
        ({"0": ""}, "slot_labels must give slot 0 1..64 labels, found 0"),
        ({"0": "fast"}, "slot_labels must give slot 0 each label once, .* found 'fast'"),
        ({"0": "tier=fast wall="}, "found 'wall='"),
        ({"0": "tier=fast, wall=a"}, "without a comma, found 'tier=fast,'"),
        ({"0": "a=1 b=2 a=3"}, "found 'a=3'"),
        ({"0": "t!er=fast"}, "found 't!er=fast'"),
        ({"0": f"tier={'x' * 257}"}, "a value of 1..256 characters without a comma, found 'tier=x"),
        ({"3": " ".join(f"l{at}=1" for at in range(65))}, "slot_labels must give slot 3 1..64 labels, found 65"),
    ],
)
def test_labels_of_a_device_are_bounded_and_each_is_given_once(
    labels: dict[str, str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=why):
        worker_settings({"slot_labels": labels}, tmp_path, env={})


def test_labels_of_a_device_come_from_the_file_a_variable_or_a_flag(tmp_path: Path) -> None:
    devices = simulated_hosts("3xH100")[0].devices
    written = {"0": "tier=fast wall=a", "2": "rev=2.0=x"}
    env = {"MOORAGE_WORKER_SLOT_LABELS": "0=tier=fast wall=a,2=rev=2.0=x"}
    for held in (worker_settings({"slot_labels": written}, tmp_path, env={}), worker_settings({}, tmp_path, env=env)):
        found = [device.labels for device in held[0].kept_devices(devices)]
        assert found == [{"tier": "fast", "wall": "a"}, {}, {"rev": "2.0=x"}]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"lease_gid": "4294967295"}, "lease_gid of .worker. must be a whole number, 0..4294967294"),
        ({"lease_uids": "0,-1"}, "lease_uids must be 0..4294967294, found -1"),
        ({"address": "n07 n08"}, "address must match .*, found 'n07 n08'"),
        ({"interface": "eth0,eth1/2"}, "interface must match .*, found 'eth0,eth1/2'"),
    ],
)
def test_what_a_host_cannot_have_is_refused(given: dict[str, str], why: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=why):
        worker_settings(given, tmp_path, env={})


@pytest.mark.parametrize(
    ("given", "found", "allowed"),
    [
        ({"slot_labels": {"2": "a=b"}}, "slot_labels names position 2, and this host has 2 devices", "0..1"),
        ({"slot_modes": {"2": "exclusive"}}, "slot_modes names position 2, and this host has 2 devices", "0..1"),
        ({"lent_slots": "0,7"}, "lent_slots names position 7, and this host has 2 devices", "0..1"),
        ({"lent_slots": "-1"}, "lent_slots names position -1, and this host has 2 devices", "0..1"),
    ],
)
def test_positions_without_a_device_are_refused_by_the_name_of_the_setting(
    given: dict[str, Any], found: str, allowed: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as refused:
        worker_settings(given, tmp_path, env={})[0].kept_devices(simulated_hosts("2xH100")[0].devices)
    told = refused.value.problem
    assert (told.message, told.allowed) == (found, allowed)
    assert told.next.startswith(f"give {told.field.removeprefix('$.')} positions of this host's devices")


@pytest.mark.parametrize("rules", [{"acme": -1}, {"acme": 10**9}, {"no such tenant!": 60}])
def test_an_end_of_idle_jobs_that_cannot_be_is_refused(rules: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(Refused, match="idle_reclaim_s"):
        worker_settings({"idle_reclaim_s": rules}, tmp_path, env={})


def test_a_cluster_has_its_own_defaults_and_what_is_said_stays() -> None:
    one, _ = scheduler_settings({}, env={})
    three, found = scheduler_settings({"replicas": "3", "takeover_s": "10s"}, env={})
    assert (one.lease_s, one.takeover_s) == (Config().lease_s, Config().takeover_s)
    assert three.lease_s == CLUSTER_DEFAULTS["lease_s"]
    assert three.takeover_s == 10
    assert as_words(found) == "takeover_s = 10s (--takeover-s); replicas = 3 (--replicas)"


@pytest.mark.parametrize(
    "url",
    [
        "nats://user:word@h:1", "nats://user:wo@rd@h:1,tls://t:word@i", "nats://word@h", "nats://user:wo/rd@h:1",
        "user:word@h:1", "word@h:1",
    ],
)  # fmt: skip
def test_a_url_is_told_without_its_password(url: str) -> None:
    rows = [each.setting for each in effective(NO_FILE)]
    one = next(each for each in rows if (each.section, each.key) == ("scheduler", "nats"))
    assert "rd@" not in shown(one, url)
    assert shown(one, url).removeprefix("nats://").startswith("***@h")
    assert shown(one, "site@ana") == "site@ana"


def test_a_choice_is_one_of_its_words() -> None:
    with pytest.raises(Refused) as refused:
        scheduler_settings({"replicas": "2"}, env={})
    assert (refused.value.problem.allowed, refused.value.problem.next) == ("1, 3, 5", "for example --replicas 1")


def test_the_environments_ledger_url_goes_before_the_files(tmp_path: Path) -> None:
    file = read_file(file_with(tmp_path, '[scheduler]\nledger_url_file = "/of/the/file"\n'))
    assert scheduler_settings({}, env={}, file=file)[0].ledger_url_file == Path("/of/the/file")
    assert scheduler_settings({}, env={"MOORAGE_LEDGER_URL": "nats://x"}, file=file)[0].ledger_url_file is None
    flag = scheduler_settings({"ledger_url_file": "/said"}, env={"MOORAGE_LEDGER_URL": "nats://x"}, file=file)
    assert flag[0].ledger_url_file == Path("/said")


def test_a_simulated_worker_offers_all_and_lies_in_a_folder_of_its_own(tmp_path: Path) -> None:
    plain, _ = worker_settings({}, tmp_path, env={})
    simulated, _ = worker_settings({"simulate": "2xH100"}, tmp_path, env={"MOORAGE_WORKER_DRIVERS": "process"})
    assert (plain.state_dir, plain.drivers) == (tmp_path / "here", ("process",))
    assert (simulated.state_dir, simulated.drivers) == (tmp_path / "simulated", ("process",))
    assert "mps" in simulated.modes


def test_variables_that_only_look_like_settings_are_told() -> None:
    found = settle("scheduler", SchedulerSettings, env={})
    env = {"MOORAGE_SCHEDULER_PORT_4222_TCP": "x", "MOORAGE_SCHEDULER_LEASE_S": "20", "PATH": "/"}
    assert unknown_variables("scheduler", found, env) == ["MOORAGE_SCHEDULER_PORT_4222_TCP"]


def test_the_commands_own_section(tmp_path: Path) -> None:
    path = str(file_with(tmp_path, '[client]\ntenant = "vision"\nnats = "prod"\ntimeout = "1m"\n'))
    env = {"MOORAGE_SETTINGS": path}
    assert client_settings(env) == {"tenant": "vision", "nats": "prod", "timeout": 60}
    assert client_settings(env | {"MOORAGE_TENANT": "llm", "NATS_URL": "x:1"}) == {"tenant": "llm", "timeout": 60}
    assert client_settings({"HOME": str(tmp_path)}) == {}


def test_flags_are_made_for_every_key_but_the_common_ones() -> None:
    fields = flags_of("worker", WorkerSettings).__dataclass_fields__  # type: ignore[attr-defined]
    assert set(fields) == set(declared("worker", WorkerSettings)) - {"nats"}


def test_what_holds_is_shown_with_its_source() -> None:
    rows = {(found.setting.section, found.setting.key): found for found in effective(NO_FILE)}
    assert shown(*rows["worker", "output_keep"][:2]) == "1d"
    assert shown(*rows["scheduler", "history_bytes"][:2]) == "10GiB"


@given(st.integers(0, 10**12))
def test_sizes_are_read_back_as_shown(size: int) -> None:
    one = declared("worker", Tried)["room"]
    assert size_bytes(shown(one, size)) == size


@given(st.integers(0, 10**6))
def test_durations_are_read_back_as_shown(seconds: int) -> None:
    one = declared("worker", Tried)["keep"]
    assert duration_s(shown(one, float(seconds))) == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1k", 1000), ("1KiB", 1024), ("1.5 MiB", 1572864), ("10GB", 10**10), ("2TiB", 2 << 40), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e3", "10 m", "1iB", "1KiBs", "½", "10m", "1kib", "9" * 400])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="KiB"):
        size_bytes(text)


def test_a_fleet_of_ones_own_takes_no_setting_of_a_site_and_no_file_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SettingsFile(tmp_path, {"scheduler": {"copies": 3, "user": "jobs", "wait": 2}})
    own = {OWN_FLEET_VARIABLE: "1", "MOORAGE_SCHEDULER_COPIES": "5"}
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    values = {key: one.value for key, one in settle("scheduler", Own, env=own, file=file).items()}
    assert values == {"copies": 1, "user": "", "wait": 2}
    assert settle("scheduler", Own, env=own, file=file, flags={"copies": 3})["copies"].value == 3
    assert settle("scheduler", Own, env={}, file=file)["copies"].value == 3
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert settle("scheduler", Own, env=own, file=file)["user"].value == "jobs", "root's jobs are not root's by this"

    monkeypatch.setattr(settings_file, "SYSTEM_FOLDER", str(tmp_path))
    (tmp_path / "moorage.toml").write_text("")
    home = {"HOME": str(tmp_path / "home")}
    assert find_file(env=home) == tmp_path / "moorage.toml"
    assert find_file(env={**home, OWN_FLEET_VARIABLE: "1"}) is None
