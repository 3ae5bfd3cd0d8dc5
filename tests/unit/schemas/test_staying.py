"""The fields of `run` with which a job stays: restart, max_restarts, ready and ports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.schemas.job import Request
from moorage.schemas.staying import Ready, own_port, port_variable


def request(run: dict[str, Any], **fields: Any) -> Request:
    return msgspec.convert({"run": {"argv": ["server"], **run}, **fields}, Request)


def test_a_job_does_not_stay_unless_it_says_so() -> None:
    run = request({}).workload
    assert (run.restart, run.stays, run.max_restarts, run.ready, run.ports) == ("never", False, None, None, 0)
    assert msgspec.to_builtins(run) == {"argv": ["server"]}


@pytest.mark.parametrize("restart", ["on-failure", "always"])
def test_a_job_that_stays(restart: str) -> None:
    made = request({"restart": restart, "max_restarts": 3, "ports": 2, "ready": {"http": "PORT_1/health"}})
    assert made.trouble is None
    assert made.workload.stays
    assert made.workload.ready == Ready(http="PORT_1/health", within_s=120, every_s=5)


@pytest.mark.parametrize(
    ("run", "fields", "place"),
    [
        ({"max_restarts": 3}, {}, "run.max_restarts"),
        ({"restart": "always"}, {"retries": 1}, "retries"),
        ({"restart": "always"}, {"replicas": 2, "gpu": {"scheduling": "gang"}}, "run.restart"),
        ({"ready": {}}, {}, "run.ready"),
        ({"ready": {"tcp": 80, "file": "ready"}}, {}, "run.ready"),
        ({"ready": {"tcp": "PORT"}}, {}, "run.ready.tcp"),
        ({"ports": 1, "ready": {"tcp": "PORT_1"}}, {}, "run.ready.tcp"),
        ({"ready": {"tcp": 0}}, {}, "run.ready.tcp"),
        ({"ready": {"tcp": 65536}}, {}, "run.ready.tcp"),
        ({"ready": {"tcp": "http"}}, {}, "run.ready.tcp"),
        ({"ready": {"http": "/health"}}, {}, "run.ready.http"),
        ({"ready": {"http": "80/a b"}}, {}, "run.ready.http"),
        ({"ready": {"http": "80/a\r\nX: y"}}, {}, "run.ready.http"),
        ({"ready": {"file": "../ready"}}, {}, "run.ready.file"),
        ({"ready": {"file": "/etc/passwd"}}, {}, "run.ready.file"),
        ({"ready": {"file": ""}}, {}, "run.ready.file"),
        ({"ready": {"call": True}}, {}, "run.ready.call"),
    ],
)
def test_what_cannot_be_is_refused(run: dict[str, Any], fields: dict[str, Any], place: str) -> None:
    trouble = request(run, **fields).trouble
    assert trouble is not None
    assert trouble.field == place


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"restart": "always", "max_restarts": 0}, "max_restarts must be 1..1000000, found 0"),
        ({"ports": 17}, "ports must be 0..16, found 17"),
        ({"ready": {"tcp": 80, "within_s": 0}}, "within_s must be above 0"),
        ({"ready": {"tcp": 80, "every_s": 0.5}}, "every_s must be 1..3600 seconds, found 0.5"),
        ({"restart": "sometimes"}, "Invalid enum value 'sometimes'"),
    ],
)
def test_what_is_out_of_bounds_is_refused_at_once(run: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        request(run)


def test_the_names_of_the_ports() -> None:
    assert [port_variable(number) for number in range(3)] == ["PORT", "PORT_1", "PORT_2"]
    assert [own_port(word) for word in ("PORT", "PORT_1", "8000", "PORTS", "PORT_01")] == [0, 1, None, None, None]
    assert (Ready(http="PORT_1/a/b").port, Ready(http="PORT_1/a/b").path) == ("PORT_1", "/a/b")
    assert (Ready(tcp=80).port, Ready(tcp=80).path, Ready(file="x").port) == ("80", "/", "")
