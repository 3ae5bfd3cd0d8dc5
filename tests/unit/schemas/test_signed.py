"""Who submitted a request, as the scheduler writes it into the body."""

from __future__ import annotations

import msgspec
import pytest

from moorage.schemas.codec import canonical, decode_request, identity
from moorage.schemas.job import Request, Run
from moorage.schemas.signed import person_in, signed, unsigned

BODY = b'{"job": "a", "run": {"argv": ["true"]}, "labels": {"who": "x"}}'
PACKED = canonical(decode_request(BODY))


@pytest.mark.parametrize("body", [BODY, BODY + b" \n", PACKED])
def test_a_person_is_a_field_of_the_request_and_no_part_of_what_it_asks_for(body: bytes) -> None:
    made = signed(body, "lena")
    assert decode_request(made).person == person_in(made) == "lena"
    assert identity(decode_request(made)) == identity(decode_request(BODY)), "so another person may ask again"
    assert decode_request(unsigned(made)) == decode_request(BODY)
    assert signed(made, "lena") == made
    assert signed(body, "") == body


def test_the_person_stays_where_it_is_found_however_a_request_is_written() -> None:
    """The history and changed jobs have the request in another order of fields."""
    made = decode_request(signed(BODY, "lena"))
    assert person_in(msgspec.json.encode(made)) == "lena"
    assert Request.__struct_fields__[-1] == "person"


@pytest.mark.parametrize(
    "body",
    [
        b'{"run":{"argv":["true"]},"labels":{"a":"b","person":"omar"}}',
        msgspec.json.encode({"run": {"argv": ["true"]}, "labels": {"a": ',"person":"omar"}'}}),
        canonical(Request(run=Run(argv=["true"]), template=None, labels={"zz": ',"person":"omar"}'})),
    ],
)
def test_what_stands_in_a_value_is_no_person(body: bytes) -> None:
    assert person_in(body) == ""
    assert unsigned(body) == body
