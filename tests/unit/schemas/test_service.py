"""The field `service` of a request, the subjects of its calls, and what its members may publish and hear."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.schemas.job import Request
from moorage.schemas.roles import may_answer, rights
from moorage.schemas.service import CALL_ERRORS, BatchSpec, QueueSpec, Scale, ServiceSpec, batch_of, queue_of
from moorage.schemas.subjects import Subjects

RUN = {"argv": ["moorage", "serve", "embedder:embed"]}


def request(**fields: Any) -> Request:
    return msgspec.convert({"run": RUN, **fields}, Request)


def test_a_service_is_a_name_and_a_number_of_calls_at_a_time() -> None:
    made = request(service={"name": "embed", "concurrency": 8})
    assert made.trouble is None
    assert made.service == ServiceSpec("embed", 8)
    assert msgspec.to_builtins(request(service={"name": "embed"}))["service"] == {"name": "embed"}
    assert "service" not in msgspec.to_builtins(request())
    batched = request(service={"name": "embed", "concurrency": 128, "batch": {"most": 32, "wait_ms": 5}})
    assert batched.trouble is None
    assert batched.service is not None
    assert batch_of(str(batched.service.batch)) == batched.service.batch == BatchSpec(32, 5)
    for queue in ({}, {"most": 0}, {"most": 10_000, "wait_s": 0.5}, {"wait_s": 86_400}):
        waiting = request(service={"name": "embed", "queue": queue})
        assert waiting.trouble is None
        assert waiting.service is not None
        assert queue_of(str(waiting.service.queue)) == waiting.service.queue
    assert queue_of("") == QueueSpec()


def test_the_number_of_a_services_members_follows_its_calls_between_two_bounds() -> None:
    made = request(service={"name": "embed"}, replicas={"max": 8})
    assert made.trouble is None
    assert (made.scale, made.copies, made.numbers) == (Scale(8, 1, 200), 8, ((0, 7),))
    assert msgspec.to_builtins(made)["replicas"] == {"max": 8}
    plain = request(replicas=3)
    assert (plain.scale, plain.copies) == (None, 3)


@pytest.mark.parametrize(
    "scale",
    [
        {"max": 0}, {"max": 1025}, {"min": 2}, {"min": 3, "max": 2}, {"min": -1, "max": 2},
        {"max": 2, "wait_target_ms": 0}, {"max": 2, "wait_target_ms": 60_001}, {"max": 2, "target": 1},
    ],
)  # fmt: skip
def test_bounds_that_are_none_are_refused(scale: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.replicas"):
        msgspec.json.decode(
            msgspec.json.encode({"run": RUN, "service": {"name": "a"}, "replicas": scale}), type=Request
        )


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"replicas": {"max": 2}}, "replicas"),
        ({"service": {"name": "a"}, "replicas": {"max": 2}, "max_running": 1}, "max_running"),
        ({"service": {"name": "a"}, "replicas": {"max": 2}, "gpu": {"scheduling": "gang"}}, "service"),
        ({"service": {"name": "a"}, "replicas": {"min": 0, "max": 1}, "start_within_s": 5}, "start_within_s"),
        ({"service": {"name": ""}}, "service.name"),
        ({"service": {"name": "a.b"}}, "service.name"),
        ({"service": {"name": "~"}}, "service.name"),
        ({"service": {"name": "*"}}, "service.name"),
        ({"service": {"name": "x" * 49}}, "service.name"),
        ({"service": {"name": "a", "concurrency": 0}}, "service.concurrency"),
        ({"service": {"name": "a", "concurrency": 4097}}, "service.concurrency"),
        ({"service": {"name": "a", "sleep_after_s": -1}, "gpu": {}}, "service.sleep_after_s"),
        ({"service": {"name": "a", "sleep_after_s": 2_592_001}, "gpu": {}}, "service.sleep_after_s"),
        ({"service": {"name": "a", "sleep_after_s": 5}}, "service.sleep_after_s"),
        ({"service": {"name": "a", "sleep_after_s": 5}, "gpu": {"sharing": "mps"}}, "service.sleep_after_s"),
        ({"service": {"name": "a", "awake_s": 86_401}}, "service.awake_s"),
        ({"service": {"name": "a", "batch": {"most": 0}}}, "service.batch.most"),
        ({"service": {"name": "a", "batch": {"most": 1025}}}, "service.batch.most"),
        ({"service": {"name": "a", "batch": {"most": 8, "wait_ms": 10001}}}, "service.batch.wait_ms"),
        ({"service": {"name": "a", "batch": {"most": 8, "wait_ms": -1}}}, "service.batch.wait_ms"),
        ({"service": {"name": "a", "concurrency": 129, "batch": {"most": 32}}}, "service.concurrency"),
        ({"service": {"name": "a", "queue": {"most": -1}}}, "service.queue.most"),
        ({"service": {"name": "a", "queue": {"most": 10_001}}}, "service.queue.most"),
        ({"service": {"name": "a", "queue": {"wait_s": -1}}}, "service.queue.wait_s"),
        ({"service": {"name": "a", "queue": {"wait_s": 86_401}}}, "service.queue.wait_s"),
        ({"service": {"name": "a"}, "run": {"driver": "handler", "argv": ["f"]}}, "run.driver"),
        ({"service": {"name": "a"}, "run": {"driver": "noop"}}, "run.driver"),
        ({"service": {"name": "a"}, "replicas": 2, "gpu": {"scheduling": "gang"}}, "service"),
    ],
)
def test_what_no_worker_can_serve_is_refused(fields: dict[str, Any], place: str) -> None:
    trouble = request(**fields).trouble
    assert trouble is not None
    assert trouble.field == place


def test_the_role_service_has_these_rights_and_no_other() -> None:
    may = rights("service", "acme", Subjects())
    assert may.subscribe == ("moorage.call.acme.>", "moorage.calls.acme.*.turn", "moorage.calls.acme.>")
    assert may.publish == (
        "_INBOX.operator.*.>",
        "_INBOX.submitter.acme.>",
        "moorage.call.acme.>",
        "moorage.calls.acme.*.load",
        "moorage.calls.acme.>",
    )
    assert may.answers == 0


def test_a_submitter_calls_and_hears_no_member() -> None:
    may = rights("submitter", "acme", Subjects())
    assert "moorage.call.acme.>" in may.publish
    assert not any(subject.startswith("moorage.call") for subject in may.subscribe)


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        ("_INBOX.submitter.acme.x.7", True),
        ("_INBOX.operator.ana.x.7", True),
        ("_INBOX.x.7", True),
        ("_INBOX.submitter.beta.x.7", False),
        ("moorage.calls.acme.embed.have", False),
        ("moorage.call.acme.other", False),
        ("moorage.api.acme.cancel", False),
        ("$JS.API.STREAM.PURGE.X", False),
    ],
)
def test_a_member_answers_where_the_caller_may_hear(reply: str, is_right: bool) -> None:
    assert may_answer("moorage", "moorage.call.acme.embed", reply) is is_right


def test_subjects_of_a_service() -> None:
    subjects = Subjects("gpu.eu")
    assert subjects.call("acme", "embed") == "gpu.eu.call.acme.embed"
    assert subjects.call_cancel("acme", "embed") == "gpu.eu.call.acme.embed.cancel"
    assert subjects.member("acme", "embed", "have") == "gpu.eu.calls.acme.embed.have"
    assert subjects.member_inbox("acme") == "gpu.eu.calls.acme.~"


def test_only_errors_after_a_start_may_have_had_an_effect() -> None:
    not_started = {name for name, (_, started, _) in CALL_ERRORS.items() if not started}
    assert not_started == {"busy", "expired", "input-refused", "bad-header", "no-endpoint"}
