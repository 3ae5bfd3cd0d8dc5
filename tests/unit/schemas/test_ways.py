"""How a request came: what of it nats-server has stamped, and what proves nothing."""

from __future__ import annotations

import json

import pytest

from moorage.schemas.ways import NO_REPLY, OPEN, QUEUE, STAMP, SUBJECT, person_of, proves, way, words

REPLY = "_R_.x.y"


def stamped(**said: object) -> dict[str, str]:
    return {STAMP: json.dumps(said)}


def test_what_the_server_stamped_names_account_and_key() -> None:
    came = way(stamped(acc="MOORAGE_TENANT_acme", user="UABC", rtt=5), REPLY, has_keys=True)
    assert came == words(came) == "import MOORAGE_TENANT_acme UABC"
    assert way(stamped(acc="MOORAGE_TENANT_acme"), REPLY, has_keys=True) == "import MOORAGE_TENANT_acme"
    assert proves(came)


@pytest.mark.parametrize(("reply", "came"), [("", NO_REPLY), ("_INBOX.operator.ana.x", SUBJECT), ("_R_x.y", SUBJECT)])
def test_a_stamp_beside_no_reply_of_an_import_is_the_senders_own(reply: str, came: str) -> None:
    assert way(stamped(acc="MOORAGE_TENANT_acme", user="UABC"), reply, has_keys=True) == came


@pytest.mark.parametrize(
    "stamp", ["", "x", "[]", '{"acc": 1}', '{"acc": ""}', '{"acc": "a b"}', '{"acc": "\\u202e"}', "{" * 10_000]
)
def test_a_stamp_that_is_none_says_nothing(stamp: str) -> None:
    assert way({STAMP: stamp}, REPLY, has_keys=True) == SUBJECT


def test_a_key_that_is_no_word_is_left_out() -> None:
    assert way(stamped(acc="A", user="u\n" + "x" * 200), REPLY, has_keys=True) == "import A"


def test_on_a_server_without_keys_nothing_is_proven_whatever_a_message_says() -> None:
    came = way(stamped(acc="A", user="U"), REPLY, has_keys=False)
    assert came == OPEN
    assert words(came) == "open: unproven"


def test_an_order_for_whose_answer_nobody_waits_is_marked() -> None:
    assert [way(None, reply, has_keys=True) for reply in (REPLY, "")] == [SUBJECT, NO_REPLY]
    assert [proves(each) for each in (SUBJECT, NO_REPLY, QUEUE, OPEN, "")] == [True, *[False] * 4]
    assert words("") == "not recorded: unproven"


def test_a_key_of_a_person_has_the_name_behind_it_and_counts_for_the_own_tenant_alone() -> None:
    persons = {"ULENA": "acme/lena"}
    came = way(stamped(acc="MOORAGE_TENANT_acme", user="ULENA"), REPLY, has_keys=True, persons=persons)
    assert came == "import MOORAGE_TENANT_acme ULENA acme/lena"
    assert [person_of(came, tenant) for tenant in ("acme", "beta")] == ["lena", ""]
    assert proves(came)


@pytest.mark.parametrize(
    "came",
    [
        "",
        OPEN,
        QUEUE,
        SUBJECT,
        "import acme/lena",
        "import A acme/lena",
        "import A acme/lena x/y",
        "subject a b acme/x",
    ],
)
def test_no_other_way_has_a_person(came: str) -> None:
    assert person_of(came, "acme") == ""


@pytest.mark.parametrize("reply", ["", "_INBOX.submitter.acme.x"])
def test_a_forged_stamp_names_nobody(reply: str) -> None:
    found = way(stamped(acc="A", user="ULENA"), reply, has_keys=True, persons={"ULENA": "acme/lena"})
    assert person_of(found, "acme") == ""
