"""A scheduler without the ledger's account, beside a leader: a second ledger would end what the fleet runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.schemas.subjects import Subjects
from tests.servers import Server
from tests.system.cli.node import Lines, moorage, start


@pytest.mark.slow
async def test_no_second_ledger_begins_beside_a_leader(nats_server: Server, unique: str) -> None:
    words = ("scheduler", "--nats", nats_server.url, "--prefix", unique)
    leader = await start(*words, env={"MOORAGE_LEDGER_URL": nats_server.ledger_url})
    await Lines(leader.stderr).until("leading epoch 1")
    second = await moorage(*words)
    assert second.code == 1
    assert (
        "error[failed-precondition]: a scheduler already leads here, and its ledger is not in this account"
        in second.err
    )
    assert "MOORAGE_LEDGER_URL_FILE" in second.err
    async with await connect(nats_server.url, "test") as world:
        assert await JetStream(world)._info(Subjects(unique).ledger_stream, {}, 5) is None


@pytest.mark.slow
async def test_where_all_are_in_one_account_the_second_stands_by(nats_server: Server, unique: str) -> None:
    words = ("scheduler", "--nats", nats_server.url, "--prefix", unique)
    leader = await start(*words)
    await Lines(leader.stderr).until("leading epoch 1")
    second = await start(*words)
    log = Lines(second.stderr)
    await log.until("folded ")
    leader.terminate()
    await log.until("leading epoch 2")


@pytest.mark.slow
@pytest.mark.parametrize(("held", "why"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe\x00", "is not text")])
async def test_a_file_without_a_url_is_no_word_for_the_users_account(
    held: bytes, why: str, nats_server: Server, unique: str, tmp_path: Path
) -> None:
    file = tmp_path / "ledger-url"
    file.write_bytes(held)
    env = {"MOORAGE_LEDGER_URL_FILE": str(file)}
    for words in (("scheduler", "--prefix", unique), ("admin", "backup", str(tmp_path / "to"))):
        ended = await moorage(*words, "--nats", nats_server.url, env=env)
        assert f"error[bad-context]: the file with the ledger's URL {why}" in ended.err, ended
        assert (ended.code != 0, "Traceback" in ended.err) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--ledger-url-file", "error[bad-context]: the file with the ledger's URL cannot be read: No such file"),
        ("--record", "error[failed-precondition]: the recording {path} cannot be written: No such file"),
    ],
)
async def test_a_file_that_a_scheduler_cannot_open_is_named_with_its_option(
    option: str, said: str, nats_server: Server, unique: str, tmp_path: Path
) -> None:
    path = tmp_path / "none" / "file"
    ended = await moorage("scheduler", "--nats", nats_server.url, "--prefix", unique, option, str(path))
    assert said.format(path=path) in ended.err
    assert (option in ended.err.partition("fix: ")[2], str(path) in ended.err, ended.code != 0) == (True, True, True)
