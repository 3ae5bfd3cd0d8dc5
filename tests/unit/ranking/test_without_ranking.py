"""The package of rankers beside the scheduler: without it `pack` ranks, and that is said."""

from __future__ import annotations

import logging
import sys

import pytest

from moorage.scheduler.core.config import RANKER_DEFAULT, Config
from moorage.scheduler.core.rank.rankers import PLACES
from moorage.scheduler.main import log_settings
from moorage.scheduler.settings import scheduler_settings
from moorage.schemas.errors import Refused
from tests.unit.scheduler.driving import Driving


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in PLACES.items():
        if name != "pack":
            monkeypatch.setitem(sys.modules, place.partition(":")[0], None)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of the default settings at start."""
    with caplog.at_level(logging.INFO, logger="moorage.scheduler"):
        log_settings(scheduler_settings({}, env={})[1])
    said = [record for record in caplog.records if record.name.startswith("moorage.scheduler")]
    return [record.getMessage() for record in said if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("missing")
def test_without_it_pack_ranks_and_the_log_says_so_at_start(said: list[str]) -> None:
    settings, _ = scheduler_settings({"replicas": "3"}, env={})
    assert settings.ranker == "pack"
    drive = Driving(Config(ranker=settings.ranker))
    drive.worker()
    drive.submit("j")
    assert drive.placed_on("j") == ["w0"]
    assert len(said) == 1
    assert said[0].startswith("hosts are ranked by pack, as the ranker fragments cannot be used here: moorage.ranking.")


def test_with_it_nothing_is_said(said: list[str]) -> None:
    assert scheduler_settings({}, env={})[0].ranker == RANKER_DEFAULT
    assert not said


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("ranker", sorted(PLACES.keys() - {"pack"}))
def test_a_ranker_that_is_set_and_missing_is_refused(ranker: str) -> None:
    with pytest.raises(Refused, match=f"^ranker: {PLACES[ranker]}: there is no module 'moorage.ranking"):
        scheduler_settings({"ranker": ranker}, env={})
