"""What the acts on the whole ledger raise is an error of the command, and no traceback; no server needed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from moorage.cli.fleet.ledger import ledger_guarded
from moorage.cli.framework.exit_codes import EXIT_FAILED
from moorage.cli.framework.options import OF_LEDGER
from moorage.scheduler.ledger.backup import MAGIC, BackupRefused, Header, read
from moorage.scheduler.ledger.ledger import Deposed, LedgerBroken
from moorage.scheduler.ledger.state_bytes import BadSnapshot, dump, snapshot_digest
from tests.unit.scheduler.driving import Driving


@pytest.mark.parametrize("kind", [BadSnapshot, Deposed, LedgerBroken, OSError])
def test_what_ends_a_restore_is_told_in_one_line(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    def act() -> int:
        raise kind("chunk at 0 was not stored")

    assert ledger_guarded(OF_LEDGER, act) == EXIT_FAILED
    assert "error[failed-precondition]: chunk at 0 was not stored" in capsys.readouterr().err


def test_a_backup_whose_state_contradicts_itself_is_refused(tmp_path: Path) -> None:
    drive = Driving.with_hosts(2)
    for name in ("a", "b"):
        drive.submit(name, gpu={})
    drive.settle()
    first, second = drive.state.workers["w0"].attempts.values()
    second.mask = first.mask
    drive.state.digest = drive.state.full_digest()
    data = dump(drive.state)
    digest, file = snapshot_digest(data), tmp_path / "a.backup"
    header = Header("l", drive.state.seq, 1, 2, 1, 0.0, "0.3", digest, len(data), 1)
    file.write_bytes(MAGIC + msgspec.json.encode(header) + b"\n" + data)
    with pytest.raises(BackupRefused, match="contradicts itself"):
        read(file)
