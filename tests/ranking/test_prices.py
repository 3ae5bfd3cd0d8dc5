"""Prices: what a device is worth depends on what runs out first."""

from __future__ import annotations

from moorage.ranking.prices import ONE, Prices
from moorage.ranking.table import HostTable
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.schemas.gpu import GpuSpec
from tests.ranking.test_fragments import add, request, worker


def test_no_gpu_is_dear_where_processors_run_out_first() -> None:
    """More processors are asked for than there are: the mix is as if it asked for all, and GPUs are left by then."""
    shapes, fleet = Shapes(), Fleet()
    for num, (model, gpus, cpu) in enumerate([("NVIDIA T4", 2, 104_000), *[("NVIDIA A10", 8, 64_000)] * 3]):
        add(fleet, worker(num, [model] * gpus, cpu))
    light, alone = shapes.of(request(GpuSpec(), 4_000)), shapes.of(request(None, 16_000))

    def dearest(mix: list[tuple[Shape, int]]) -> int:
        return int(Prices(HostTable(fleet), mix, None).settle().gpu.max())

    assert dearest([(light, 10), (alone, 2)]) * 4 > ONE
    assert dearest([(light, 10), (alone, 10)]) * 4 < ONE
