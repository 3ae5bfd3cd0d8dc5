"""A request that no scheduler answers comes with advice for where it was sent."""

from __future__ import annotations

import pytest

from moorage.bus.errors import NoResponders
from moorage.client.errors import NoScheduler, unanswered


@pytest.mark.parametrize(
    ("where", "advice"),
    [
        ("nats://h1:4222 (from a.json, named by NATS_CONTEXT)", "start one: moorage scheduler, or all of it"),
        ("nats://h1:4222,nats://h2:4222,nats://h3:4222", "ask again, as a standby takes over"),
        ("nats://h1:4222,nats://h2:4222 (from a.json)", "ask again, as a standby takes over"),
    ],
)
def test_on_a_cluster_the_advice_is_to_ask_again_first(where: str, advice: str) -> None:
    """Between a leader's death and its standby's term doctor said "start one", and how to on one machine."""
    told = unanswered(NoResponders("moorage.api.vision.ls"), where, 10)
    assert isinstance(told, NoScheduler)
    assert told.fixes[0].startswith(advice)
