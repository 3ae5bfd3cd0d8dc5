"""Ports of a worker's range, for attempts as long as they live."""

from __future__ import annotations

import socket

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Refused
from moorage.schemas.staying import port_range
from moorage.worker.attempt.environment import LacksHere
from moorage.worker.attempt.service_ports import ServicePorts


def name(number: int) -> AttemptName:
    return ("acme", "a", number, 1, 10 + number)


def ports_of(text: str, taken: set[int] | None = None) -> ServicePorts:
    return ServicePorts(port_range(text), set() if taken is None else taken, "10.0.0.5", probes=False)


def test_no_port_is_given_twice_before_it_is_given_back() -> None:
    ports = ports_of("20000-20003")
    first, second = ports.take(name(0), 2), ports.take(name(1), 1)
    assert (first, second) == ((20000, 20001), (20002,))
    ports.give_back(name(0))
    assert ports.take(name(2), 1) == (20003,), "they go round"
    assert ports.take(name(3), 2) == (20000, 20001)
    assert ports.address(first) == "10.0.0.5:20000,20001"
    assert ports.address(()) == ""


def test_workers_of_one_process_share_their_host() -> None:
    taken: set[int] = set()
    one, other = ports_of("20000-20001", taken), ports_of("20000-20001", taken)
    assert (one.take(name(0), 1), other.take(name(1), 1)) == ((20000,), (20001,))


def test_too_few_are_refused_and_none_is_kept() -> None:
    ports = ports_of("20000-20002")
    ports.take(name(0), 2)
    with pytest.raises(Refused, match="needs 2 ports, and 1 of 20000-20002 are free"):
        ports.take(name(1), 2)
    assert ports.take(name(2), 1) == (20002,)


def test_a_worker_without_a_range_sends_the_job_elsewhere() -> None:
    with pytest.raises(LacksHere, match="its setting `ports` is empty"):
        ports_of("").take(name(0), 1)
    assert ports_of("").take(name(0), 0) == ()


def test_a_port_on_which_something_listens_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = ServicePorts(range(port, port + 1), set(), None)
        with pytest.raises(Refused, match="0 of"):
            ports.take(name(0), 1)


def test_what_an_earlier_agent_gave_is_taken_again() -> None:
    ports = ports_of("20000-20001")
    ports.take_again(name(0), (20000,))
    assert ports.take(name(1), 1) == (20001,)
    ports.give_back(name(0))
    assert ports.take(name(2), 1) == (20000,)


@pytest.mark.parametrize("text", ["20000", "20001-20000", "0-5", "a-b", "60000-70000", "-"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ports must look like 20000-29999"):
        port_range(text)
