"""An attempt has a folder of its own, whichever way its placement leaves; a `cwd` is below it."""

from __future__ import annotations

from tests.scheduler.driving import Driving


def test_an_attempt_has_a_folder_whichever_way_its_placement_leaves() -> None:
    drive = Driving()
    drive.worker("w0", 2, auto=False)
    for job, fields in (("early", {}), ("with-a-deadline", {"deadline_s": 60})):
        drive.submit(job, gpu={}, **fields)
        (place,) = [place for frame in drive.wanted for place in frame.place]
        assert (place.job, place.folder) == (job, True)


def test_a_cwd_is_absolute_or_below_the_folder() -> None:
    drive = Driving()
    for job, cwd in (("j", "src"), ("k", "/src")):
        assert "code" not in drive.submit(job, run={"argv": ["x"], "cwd": cwd})
    for cwd in ("", "../src", "src/../..", "a\0b"):
        assert drive.submit("l", run={"argv": ["x"], "cwd": cwd})["code"] == "invalid-argument"
