"""Which devices a driver without a pool takes: OpenShell's rules, facts 17 to 20."""

from __future__ import annotations

import pytest

from moorage.schemas.capabilities import Capabilities
from moorage.schemas.driver_config import check
from moorage.schemas.errors import Refused
from moorage.schemas.gpu import GpuSpec
from moorage.worker.drivers.device_requests import NVIDIA, NextGpu, kubernetes_limits


def gpus(*names: str) -> list[str]:
    return [f"{NVIDIA}={name}" for name in names]


def test_fact_17_a_cluster_gets_a_count_as_text_and_no_ids() -> None:
    assert kubernetes_limits(GpuSpec(count=3)) == {"nvidia.com/gpu": "3"}
    assert kubernetes_limits(GpuSpec()) == {"nvidia.com/gpu": "1"}
    fault = check("kubernetes", {"gpu_device_ids": ["0"]}, GpuSpec(), Capabilities())
    assert fault is not None
    assert fault.code == "failed-precondition"


def test_fact_18_numbers_in_their_order_and_before_names() -> None:
    turn = NextGpu([*gpus("10", "2", "UUID-b", "all"), " nvidia.com/gpu=2 ", "amd.com/gpu=0"])
    assert [turn.next(1) for _ in range(3)] == [gpus("2"), gpus("10"), gpus("2")]


def test_fact_19_names_in_their_order_and_all_of_them_only_on_wsl2() -> None:
    assert NextGpu(gpus("GPU-b", "GPU-a", "all")).next(1) == gpus("GPU-a")
    with pytest.raises(Refused, match="1 GPUs are requested, and 0 are available"):
        NextGpu(gpus("all")).next(1)
    turn = NextGpu(gpus("all"), wsl2=True)
    assert turn.next(1) == turn.next(1) == gpus("all")
    with pytest.raises(Refused, match="2 GPUs are requested, and 1 are available") as refused:
        turn.next(2)
    assert (refused.value.code, refused.value.problem.field) == ("failed-precondition", "$.gpu.count")


def test_fact_20_in_turn_and_only_what_is_taken_moves_the_turn() -> None:
    turn = NextGpu(gpus("0", "1", "2"))
    assert turn.peek(2) == turn.peek(2) == gpus("0", "1")
    assert (turn.next(2), turn.next(2)) == (gpus("0", "1"), gpus("2", "0"))
    with pytest.raises(Refused):
        turn.next(4)
    assert turn.peek(1) == gpus("1")


def test_fact_20_new_devices_keep_the_turn() -> None:
    turn = NextGpu(gpus("0", "1"))
    assert turn.next(1) == gpus("0")
    turn.refresh(gpus("0", "1", "2"))
    assert turn.next(1) == gpus("1")
    turn.refresh(gpus("0"))
    assert turn.next(1) == gpus("0"), "fewer than the turn has come to"
    turn.refresh([])
    for count in (0, 1, -1):
        with pytest.raises(Refused):
            turn.peek(count)
