"""A record says a job's id once: in the body where that begins with it, by itself where not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import decode_record, encode_record
from moorage.scheduler.core.ledger.records import id_of, written_id
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Refused
from tests.unit.scheduler.driving import Driving

REST = '"gpu":{"count":1},"run":{"driver":"noop"}}'
ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True)


@pytest.mark.slow
@given(ids, st.one_of(st.binary(max_size=40), st.builds(lambda a, b: f'{{"job":"{a}"{b}'.encode(), ids, st.text())))
def test_whatever_the_body_the_id_comes_back(name: str, body: bytes) -> None:
    assert id_of(written_id(name, body), body) == name


@pytest.mark.parametrize("body", ['{"job":"one",' + REST, '{"job": "one", ' + REST])
def test_a_body_that_begins_with_the_id_is_all_that_is_written(body: str) -> None:
    drive = Driving()
    drive.submit("one", body=body.encode())
    [payload] = [each for each in drive.records if b'"job"' in each]
    assert payload.count(b"one") == 1
    assert drive.job("one").name == "one"


@pytest.mark.parametrize(
    "body",
    [
        "{" + REST,  # named by its message or by the scheduler
        '{"job":"two",' + REST,  # the same: a header counts for a body without an id alone, but fold trusts nobody
        '{"replicas":1,"job":"one",' + REST,
        '{ "job" : "one",' + REST,
    ],
)
def test_any_other_is_written_with_its_id(body: str) -> None:
    written = written_id("one", body.encode())
    assert written == "one"
    assert id_of(written, body.encode()) == "one"


def test_of_two_ids_in_a_body_that_an_older_scheduler_took_the_one_that_counts_is_written() -> None:
    body = b'{"job":"one","job":"two",' + REST.encode()
    assert decode_request(body).job == "two"
    assert id_of(written_id("two", body), body) == "two"
    with pytest.raises(Refused, match="job twice in one object"):
        Driving().submit("one", body=body)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"job":""}', b'{"job": ""}', b'{"job":"on', b'{"gpu":{}}', b'{"job":"\xff"}']
)
def test_a_record_without_an_id_is_no_record(body: bytes) -> None:
    drive = Driving()
    drive.submit("one", body=('{"job":"one",' + REST).encode())
    record = next(record for record in map(decode_record, drive.records) if record.accepts)
    record.accepts = [(record.accepts[0][0], ["", body, 1, ""])]
    record.digest = drive.state.digest
    record.epoch = drive.state.epoch
    with pytest.raises(FoldError, match="says what cannot be"):
        fold(drive.state, decode_record(encode_record(record)), drive.state.seq + 1)
