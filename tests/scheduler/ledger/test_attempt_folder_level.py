"""From which feature level on an attempt has a folder of its own: an older request keeps its meaning."""

from __future__ import annotations

import pytest

from tests.scheduler.driving import Driving


@pytest.mark.parametrize(("level", "has_folder"), [(1, False), (2, True)])
def test_an_attempt_has_a_folder_from_level_2_on(level: int, has_folder: bool) -> None:
    drive = Driving(level=level)
    drive.worker("w0", 2, auto=False)
    for job, fields in (("early", {}), ("with-a-deadline", {"deadline_s": 60})):
        drive.submit(job, gpu={}, **fields)
        (place,) = [place for frame in drive.wanted for place in frame.place]
        assert (place.job, place.folder) == (job, has_folder)


def test_what_needs_a_folder_waits_for_the_feature_level() -> None:
    drive = Driving(level=1)
    refused = drive.submit("j", run={"argv": ["x"], "cwd": "src"})
    assert (refused["code"], refused["found"]) == ("failed-precondition", "feature level 1")
    assert "code" not in drive.submit("k", run={"argv": ["x"], "cwd": "/src"})
    drive = Driving()
    assert "code" not in drive.submit("j", run={"argv": ["x"], "cwd": "src"})
    for cwd in ("", "../src", "src/../..", "a\0b"):
        assert drive.submit("l", run={"argv": ["x"], "cwd": cwd})["code"] == "invalid-argument"
