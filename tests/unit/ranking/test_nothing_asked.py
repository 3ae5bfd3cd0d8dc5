"""Every ranker on fleets without a host, a device or a second kind, and for requests that no device answers."""

from __future__ import annotations

from typing import Any, Final

import pytest

from moorage.ranking.mix import LOOK_FIRST
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.rank.rankers import PLACES
from tests.unit.scheduler.driving import Driving

T4: Final = "NVIDIA T4"
L40S: Final = "NVIDIA L40S"
H100: Final = "NVIDIA H100 80GB HBM3"
#: what the jobs of one case ask for; none of it is one whole GPU of any model
REQUESTS: Final[dict[str, list[dict[str, Any]]]] = {
    "no-gpu": [{}],
    "processors": [{"resources": {"cpu_milli": 1_000}}],
    "no-such-model": [{"gpu": {"model": "=Nothing"}}],
    "too-many": [{"gpu": {"count": 64}}],
    "shares": [{"gpu": {"sharing": "mps", "share": {"compute_percent": 30}}}],
    "one-slot": [{"gpu": {"sharing": "time-slice", "time_slice_index": 7}}],
    "gangs": [{"gpu": {"scheduling": "gang", "count": 8}, "replicas": 2}],
    "spread": [{"gpu": {"scheduling": "spread", "count": 2}, "replicas": 2}],
    "no-gpu-and-no-such-model": [{}, {"gpu": {"model": "=Nothing"}}],
}
#: the models of each host's devices, before the jobs come and of those that join later
FLEETS: Final[dict[str, tuple[list[list[str]], list[list[str]]]]] = {
    "none": ([], [[]]),
    "none-then-two": ([], [[T4] * 4, [L40S] * 8]),
    "without-devices": ([[], []], [[]]),
    "without-devices-then-one": ([[]], [[T4] * 8]),
    "one-then-a-second-kind": ([[T4] * 8], [[L40S] * 8]),
    "two": ([[T4] * 4, [L40S] * 8], []),
    "mixed": ([[T4, L40S, T4, T4]], [[]]),
}


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("requests", REQUESTS)
def test_whatever_is_asked_of_whatever_fleet_is_decided(requests: str, fleet: str) -> None:
    drive = _decided("fragments", REQUESTS[requests], *FLEETS[fleet])
    if requests == "no-gpu" and drive.workers:
        assert {state for job in drive.state.jobs.values() for state in drive.states(job.name)} == {"RUNNING"}


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("ranker", sorted(PLACES.keys() - {"fragments"}))
def test_every_ranker_decides_on_every_fleet(ranker: str, fleet: str) -> None:
    _decided(ranker, [request for requests in REQUESTS.values() for request in requests], *FLEETS[fleet])


def _decided(ranker: str, requests: list[dict[str, Any]], before: list[list[str]], later: list[list[str]]) -> Driving:
    """More jobs come than the mix needs to be in use, then hosts of other kinds join, then as many jobs come again."""
    drive = Driving(Config(ranker=ranker))
    drive.checks = False  # once, at the end
    for number, models in enumerate(before):
        drive.worker(f"w{number}", models=models)
    _offer(drive, "first", requests)
    drive.tick()
    for number, models in enumerate(later):
        drive.worker(f"late{number}", models=models)
    drive.tick()
    _offer(drive, "second", requests)
    drive.tick()
    drive.settle()
    drive.check()
    assert len(drive.state.jobs) == 2 * (LOOK_FIRST + 8)
    return drive


def _offer(drive: Driving, name: str, requests: list[dict[str, Any]]) -> None:
    for number in range(LOOK_FIRST + 8):
        drive.offer_submit(f"{name}-{number}", **requests[number % len(requests)])


def test_thirty_two_jobs_without_a_gpu_start_on_two_models() -> None:
    drive = Driving()
    drive.worker("a", 8, H100)
    drive.worker("b", 4, L40S)
    for number in range(60):
        drive.offer_submit(f"j{number}")
    drive.tick()
    drive.settle()
    assert {drive.states(f"j{number}")[0] for number in range(60)} == {"RUNNING"}


def test_queued_jobs_without_a_gpu_start_once_a_second_model_has_joined() -> None:
    """Of the durable queue, and with a takeover in between: the next leader finds the same arrivals in the ledger."""
    drive = Driving()
    drive.worker("a", 8, H100)
    for number in range(60):
        drive.offer_submit(f"j{number}", sequence=number + 1)
    drive.tick()
    drive.settle()
    drive.worker("b", 4, L40S)
    drive.submit("one-more")
    drive.lead()
    for worker in drive.workers.values():
        drive.join(worker)
    drive.submit("another")
    drive.settle()
    assert drive.states("one-more") == drive.states("another") == ["RUNNING"]
