"""Notices of clouds that a machine will be interrupted, as they are sent: each form by a server that answers so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moorage.worker.interruption import Interruption, check_notice, leave_s_of

TOKEN = "of-this-machine"


class Metadata(ThreadingHTTPServer):
    """A cloud's metadata: answers by path, and 404 for any other one. What AWS wants a token for is 401 without it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.answers: dict[str, str] = {}
        self.wanted: tuple[str, str] = ("", "")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._say(200, TOKEN)

    def do_GET(self) -> None:
        name, value = self.server.wanted
        if name and self.headers[name] != value:
            self._say(401, "")
        elif self.path in self.server.answers:
            self._say(200, self.server.answers[self.path])
        else:
            self._say(404, "")

    def _say(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def in_s(seconds: float) -> datetime:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).replace(microsecond=0)


def test_aws_tells_the_time_to_who_shows_a_token(metadata: Metadata) -> None:
    metadata.wanted = ("X-aws-ec2-metadata-token", TOKEN)
    there = Interruption(f"aws={metadata.url}")
    assert there.look() is None
    at = in_s(100).isoformat().replace("+00:00", "Z")
    metadata.answers["/latest/meta-data/spot/instance-action"] = f'{{"action": "terminate", "time": "{at}"}}'
    left_s = there.look()
    assert left_s is not None
    assert 40 < left_s <= 100
    metadata.answers["/latest/meta-data/spot/instance-action"] = (
        '{"action": "terminate", "time": "1999-01-01T00:00:00Z"}'
    )
    assert there.look() == 120.0, "a wrong clock: what AWS promises"


def test_google_says_true(metadata: Metadata) -> None:
    metadata.wanted = ("Metadata-Flavor", "Google")
    there = Interruption(f"google={metadata.url}")
    for said, left_s in (("FALSE", None), ("TRUE", 30.0)):
        metadata.answers["/computeMetadata/v1/instance/preempted"] = said
        assert there.look() == left_s


def test_azure_lists_events_of_several_machines_of_which_its_own_counts(metadata: Metadata) -> None:
    metadata.wanted = ("Metadata", "true")
    metadata.answers["/metadata/instance/compute/name?api-version=2021-02-01&format=text"] = "spot_3"
    there = Interruption(f"azure={metadata.url}")
    events = "/metadata/scheduledevents?api-version=2020-07-01"

    def says(*of: tuple[str, str, str]) -> float | None:
        listed = ", ".join(
            f'{{"EventId": "1-2", "EventType": "{kind}", "ResourceType": "VirtualMachine", "Resources": ["{name}"],'
            f' "EventStatus": "Scheduled", "NotBefore": "{at}", "Description": ""}}'
            for kind, name, at in of
        )
        metadata.answers[events] = f'{{"DocumentIncarnation": 1, "Events": [{listed}]}}'
        return there.look()

    soon, later = (format_datetime(in_s(seconds), usegmt=True) for seconds in (28, 700))
    assert says() is None
    assert says(("Preempt", "spot_33", soon), ("Freeze", "spot_3", soon)) is None
    left_s = says(("Preempt", "spot_33", later), ("Preempt", "spot_3", soon))
    assert left_s is not None
    assert 0 < left_s <= 28
    assert says(("Preempt", "spot_3", "")) == 30.0


def test_any_address_that_answers_and_any_file_that_appears_are_a_notice(metadata: Metadata, tmp_path: Path) -> None:
    there = Interruption(f"{metadata.url}/soon")
    assert there.look() is None
    metadata.answers["/soon"] = ""
    assert there.look() == 30.0
    file = tmp_path / "interrupted"
    there = Interruption(str(file))
    assert there.look() is None
    file.touch()
    assert there.look() == 30.0
    file.write_text(in_s(600).isoformat().replace("+00:00", "Z"))
    left_s = there.look()
    assert left_s is not None
    assert 500 < left_s <= 600


def test_what_cannot_be_read_is_no_notice_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    there = Interruption("aws=http://127.0.0.1:9")
    assert [there.look(), there.look()] == [None, None]
    assert len([each for each in caplog.records if "cannot be read" in each.message]) == 1


@pytest.mark.parametrize("where", ["amazon", "gs://x", "relative/file", "aws=10.0.0.1", "googles"])
def test_a_place_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match="notice must be"):
        check_notice(where)


@pytest.mark.parametrize(
    ("left_s", "grace_s", "services_s"), [(120, 30, 90), (30, 30, 15), (30, 60, 15), (600, 0, 600)]
)
def test_graces_have_half_of_the_time_at_least_if_they_need_it(
    left_s: float, grace_s: float, services_s: float
) -> None:
    assert leave_s_of(left_s, grace_s) == services_s
