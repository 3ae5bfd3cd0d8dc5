"""Answers of a newer or older scheduler are read, and fields that are always sent stay so."""

from __future__ import annotations

import re

import msgspec
import pytest

from moorage.client.answers import FleetInfo, JobInfo
from moorage.client.errors import ClientError
from moorage.client.reading import as_struct
from moorage.schemas.always import sent
from moorage.schemas.answers.jobs import JobRow
from moorage.system.build import build
from tools.answers import DATA, parts_of

PARTS = dict.fromkeys(part for struct in DATA.values() for part in (struct, *parts_of(struct)))
#: without the request, which is strict: `told` reads an answer whose request it does not know
STRUCTS = [part for part in PARTS if not part.__struct_config__.forbid_unknown_fields]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_an_answer_of_another_release_is_read(struct: type[msgspec.Struct]) -> None:
    needed: dict[str, str | int] = {}
    needed |= {each.encode_name: "x" for each in msgspec.structs.fields(struct) if each.required and each.type is str}
    needed |= {each.encode_name: 1 for each in msgspec.structs.fields(struct) if each.required and each.type is int}
    try:
        msgspec.convert({**needed, "from_a_newer_release": [1]}, struct)
    except msgspec.ValidationError as error:
        pytest.fail(f"a field without default is no name or number, or a newer field is refused: {error}")


def test_a_job_whose_request_has_a_field_of_a_newer_release_is_shown_without_it() -> None:
    shown = {"job": "j", "tenant": "t", "state": "QUEUED", "request": {"run": {"argv": ["true"]}}}
    known = as_struct(JobInfo, shown)
    assert known.request is not None
    assert known.request.workload.argv == ["true"]
    newer = as_struct(JobInfo, {**shown, "request": {**shown["request"], "made_up": 1}})  # type: ignore[dict-item]
    assert (newer.job, newer.request, newer.data["request"]["made_up"]) == ("j", None, 1)


@pytest.mark.parametrize("request_", [{}, {"request": None}])
def test_an_answer_of_another_form_says_which_release_of_the_client_to_use(request_: dict[str, None]) -> None:
    later = {"job": "j", "tenant": "t", "state": {"is": "QUEUED"}, **request_}
    with pytest.raises(
        ClientError, match=rf"client is of release {re.escape(build())}, and cannot .* `object` - at `\$.state`"
    ) as e:
        as_struct(JobInfo, later)
    assert (e.value.code, "admin feature-level" in e.value.fixes[0]) == ("unread-answer", True)
    rows = [{"scheduler": "a", "release": "0.3.9"}, {"scheduler": "b", "release": "0.4.1", "leads": True}]
    with pytest.raises(ClientError) as e:
        as_struct(FleetInfo, {"queued": [1], "schedulers": rows})
    assert e.value.fixes == ("use a client of moorage 0.4.1",)


def test_a_field_that_is_always_sent_is_sent_with_its_default_and_others_are_left_out() -> None:
    sent = msgspec.to_builtins(DATA["admin.fleet"]())
    assert (sent["queued"], sent["workers"], sent["leader"]) == (0, [], "")
    assert not sent.keys() & {"next", "request_queue", "follower"}


def test_one_answer_may_send_a_field_that_others_of_its_kind_leave_out() -> None:
    row = JobRow(job="j", tenant="t", state="QUEUED")
    told = sent(row, code=None, labels={})
    assert msgspec.to_builtins(row).keys() == {"job", "tenant", "state"}
    assert msgspec.to_builtins(told).keys() == {"job", "tenant", "state", "code", "labels"}
    assert msgspec.convert(msgspec.to_builtins(told), JobRow) == row
