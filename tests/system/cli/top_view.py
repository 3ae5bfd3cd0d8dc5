"""A view of a fleet, for tests of what is drawn of it."""

from __future__ import annotations

from moorage.client.view.view import Counts, Fit, Idle, Trouble, View, Waiting, WorkerCells
from moorage.schemas.answers.jobs import JobRow

H100 = "NVIDIA H100 80GB HBM3"


def a_view(workers: int = 16, troubles: int = 3, tenants: int = 4, idle: int = 3) -> View:
    rows = [
        JobRow(tenant=f"t{at}", job=f"job-{at}", state="QUEUED", gpu="8xH100", age_ms=60_000) for at in range(tenants)
    ]
    return View(
        at_ms=1_700_000_000_000,
        leader="s1",
        epoch=7,
        heard_ms_ago=100,
        simulated="all",
        queued=9,
        running=5,
        counts=Counts(gpus=8 * workers, free=20, leased=100, sick=1),
        use=71,
        troubles=[Trouble(f"n{at:02} GPU 3", "xid: Xid 79, since 4m", grave=not at) for at in range(troubles)],
        fits=[Fit(H100, 64, 5, 4), Fit("NVIDIA L40S", 64, 0, 0)],
        waiting=[
            Waiting(
                f"t{at}", 3, f"job-{at}", "8xH100", 60_000, reason="busy", because="8 more on one host", starts_ms=4_000
            )
            for at in range(tenants)
        ],
        waits=3 * tenants,
        idle=[Idle(f"t{at}", 3, 6, f"idle-{at}", "n01", 720_000, 0, 0) for at in range(idle)],
        workers=[
            WorkerCells(f"n{at:02}", "up", True, H100, "###2··!#", [0, 50, 100, 9, 0, 0, None, None])
            for at in range(workers)
        ],
        jobs=rows,
        unseen=[],
    )
