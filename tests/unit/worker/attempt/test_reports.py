"""What an attempt reports of itself in a file: what is taken of it, what is refused, and how much is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moorage.job import report
from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames.reported import LINE_BYTES_MAX, ROWS_MAX, row_of
from moorage.schemas.handler import REPORT_FILE
from moorage.worker.attempt.reports import (
    LOOK_BYTES,
    TOLD_BYTES_MAX,
    Reporting,
    Reports,
    has_reported,
    last_of,
    rows_in,
)

NAME: AttemptName = ("t", "a", 0, 1, 5)


def write(folder: Path, text: str, mode: str = "a") -> None:
    with open(folder / REPORT_FILE, mode) as file:
        file.write(text)


def test_lines_are_taken_as_they_come_and_a_part_of_one_waits_for_its_end(tmp_path: Path) -> None:
    reporting = Reporting()
    assert not reporting.look(str(tmp_path))
    assert not has_reported(str(tmp_path))
    write(tmp_path, '{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert reporting.look(str(tmp_path))
    assert reporting.values == {"step": 1, "loss": 0.5}
    assert not reporting.look(str(tmp_path))
    write(tmp_path, 'ss": 0.25}\n\r\n{"phase": "warm"}\n')
    assert reporting.look(str(tmp_path))
    assert reporting.values == {"step": 2, "loss": 0.25, "phase": "warm"}
    assert reporting.refused == ""
    write(tmp_path, '{"step": 3}\n', "w")
    reporting.look(str(tmp_path))
    assert reporting.values["step"] == 3, "it was written anew"
    write(tmp_path, '{"step": 4}')
    assert last_of(str(tmp_path)).values == {"step": 4}, "no end of a line comes behind the end"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"loss": NaN}', "loss is nan, not a finite number"),
        ('{"loss": 1e999}', "loss is inf, not a finite number"),
        ('{"loss": {"train": 1}}', "loss is an object"),
        ('{"loss": [1]}', "loss is a list"),
        ('{"loss": null}', "loss is null"),
        ('{"n": 9223372036854775808}', "n is larger than 2^63"),
        ('{"n": 1' + "0" * 4000 + "}", "n is larger than 2^63"),
        ('{"note": "' + "x" * 65 + '"}', "note has 65 characters"),
        ('{"a b": 1}', "'a b' is no name"),
        ("loss=0.5", "it is no JSON"),
        ("[1]", "it is no JSON object"),
        ("[" * 4000, "it is no JSON"),
        ('{"x": "' + "x" * LINE_BYTES_MAX + '"}', "bytes, of at most 4096"),
        ("{" + ", ".join(f'"n{number}": 1' for number in range(17)) + "}", "17 names, of at most 16"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_what_was_before_stays(tmp_path: Path, line: str, says: str) -> None:
    reporting = Reporting()
    write(tmp_path, f'{{"step": 1}}\n{line}\n')
    reporting.look(str(tmp_path))
    assert reporting.values == {"step": 1}
    assert says in reporting.refused
    assert rows_in(str(tmp_path)) == [{"step": 1}]


def test_names_and_bytes_of_an_attempt_are_bounded_together(tmp_path: Path) -> None:
    reporting = Reporting()
    write(tmp_path, "".join(f'{{"n{number}": 1}}\n' for number in range(17)))
    reporting.look(str(tmp_path))
    assert len(reporting.values) == 16
    assert reporting.refused.startswith("n16 would be one name more than 16")
    write(tmp_path, "".join(f'{{"n{number}": "{"x" * 64}"}}\n' for number in range(16)))
    reporting.look(str(tmp_path))
    assert "more than 1024 bytes" in reporting.refused


def test_of_a_flood_the_end_alone_is_read_and_the_newest_rows_stay(tmp_path: Path) -> None:
    reporting = Reporting()
    write(tmp_path, "".join(f'{{"step": {number}}}\n' for number in range(200_000)))
    reporting.look(str(tmp_path))
    assert reporting.values == {"step": 199_999}
    assert reporting.refused == "", "a line that is cut is none"
    rows = rows_in(str(tmp_path))
    assert [row["step"] for row in rows] == list(range(200_000 - ROWS_MAX, 200_000))
    write(tmp_path, "x" * (3 * LOOK_BYTES))
    reporting.look(str(tmp_path))
    write(tmp_path, '\n{"step": 1}\n')
    reporting.look(str(tmp_path))
    assert reporting.values == {"step": 1}


def test_a_link_or_a_pipe_in_its_place_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "other").write_text('{"secret": 1}\n')
    os.symlink("other", tmp_path / REPORT_FILE)
    reporting = Reporting()
    assert not reporting.look(str(tmp_path))
    os.unlink(tmp_path / REPORT_FILE)
    os.mkfifo(tmp_path / REPORT_FILE)
    assert not reporting.look(str(tmp_path))
    assert (rows_in(str(tmp_path)), has_reported(str(tmp_path))) == ([], False)


def test_a_renewal_has_at_most_16_kib_and_each_attempt_its_turn(tmp_path: Path) -> None:
    names: list[AttemptName] = [("t", "a", number, 1, 5) for number in range(100)]
    folders = {name: str(tmp_path / str(name[2])) for name in names}
    for name, folder in folders.items():
        Path(folder).mkdir()
        write(Path(folder), json.dumps({f"n{number}": "x" * 40 for number in range(10)} | {"of": name[2]}) + "\n")
    reports = Reports()
    reports.look(folders)
    told = [reports.told({}) for _ in range(4)]
    assert 0 < len(told[0]) < TOLD_BYTES_MAX // 400
    assert {each.replica for some in told for each in some} == set(range(100))
    assert told[0][0].values["of"] == told[0][0].replica
    reports.look({})
    assert reports.told({}) == []


def test_the_function_of_a_job_refuses_the_same_and_writes_what_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOORAGE_REPORT", raising=False)
    assert not report(step=1), "it is no job"
    monkeypatch.setenv("MOORAGE_REPORT", str(tmp_path / REPORT_FILE))

    class Scalar:
        def item(self) -> float:
            return 0.5

    assert report({"val/loss": Scalar()}, step=1, done=False, phase="warm")
    assert rows_in(str(tmp_path)) == [{"val/loss": 0.5, "step": 1, "done": False, "phase": "warm"}]
    for bad in (float("nan"), 1 << 63, "x" * 65):
        with pytest.raises(ValueError, match="report takes"):
            report(loss=bad)
    for wrong in ([1], None, {"a": 1}):
        with pytest.raises(TypeError, match="loss is"):
            report(loss=wrong)
    with pytest.raises(ValueError, match="names of letters"):
        report({"a b": 1})
    with pytest.raises(ValueError, match="at most 16 names"):
        report({f"n{number}": 1 for number in range(17)})
    assert len(rows_in(str(tmp_path))) == 1
    assert row_of(b'{"n": 9223372036854775807}') == {"n": (1 << 63) - 1}
