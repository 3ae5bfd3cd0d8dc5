"""`share.tflops` of a request: what percentage the scheduler takes it for, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moorage.bus.transport import Delivery
from moorage.scheduler.leader.intake import Intake
from moorage.scheduler.tflops import CAPACITIES, TFLOPS_MAX, read_capacities, resolved
from moorage.schemas.codec import decode_request, encode
from moorage.schemas.errors import Refused
from moorage.schemas.gpu import Share, format_token, parse_token
from tests.unit.scheduler.driving import SUBJECTS, Driving

HERE = """[tflops]
"NVIDIA A100-SXM4-80GB" = 312
"NVIDIA A10" = 125.0
"NVIDIA H100 PCIe" = 756.5
"NVIDIA H100 NVL" = 835.5
"""


@pytest.fixture
def here(tmp_path: Path) -> str:
    file = tmp_path / "here.toml"
    file.write_text(HERE)
    return str(file)


def _body(share: dict[str, Any], model: Any = "A100", **more: Any) -> bytes:
    return encode({"gpu": {"model": model, "sharing": "mps", "share": share}, "run": {"argv": ["true"]}, **more})


@pytest.mark.parametrize(
    ("text", "percent"),
    [("78", 25), ("312", 100), ("1k", 100), ("78000m", 25), ("4.68", 2), ("4.67", 1), ("500m", 1), ("1m", 1)],
)
def test_fact_54_a_part_in_tflops_is_a_percentage_of_its_model(here: str, text: str, percent: int) -> None:
    gpu = decode_request(resolved(_body({"tflops": text, "memory_mib": 7}), here)).gpu
    assert gpu is not None
    assert gpu.share == Share(7, percent), "what stands in the ledger does not depend on a setting"


def test_fact_54_what_has_no_capacity_is_refused_and_not_unlimited(here: str) -> None:
    with pytest.raises(Refused, match="how many TFLOPS B200 has is not known") as refused:
        resolved(_body({"tflops": "30"}, "B200"), here)
    assert refused.value.problem.field == "$.gpu.share.tflops"
    assert "NVIDIA A10" in refused.value.problem.allowed


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, "the request names none"),
        (["A100", "H100"], "the request names several"),
        ("H100", "may be GPUs of different TFLOPS"),
        ("~A10", "may be GPUs of different TFLOPS"),
    ],
)
def test_tflops_need_one_model(here: str, model: Any, said: str) -> None:
    with pytest.raises(Refused, match=said):
        resolved(_body({"tflops": "30"}, model), here)


def test_a_model_in_whole_words_or_in_full_is_one(here: str) -> None:
    for model in ("A10", "=A10", "H100 NVL", "a100"):
        assert b"tflops" not in resolved(_body({"tflops": "30"}, model), here)


def test_a_request_without_tflops_stays_the_very_same_bytes(here: str) -> None:
    for body in (_body({"compute_percent": 40}), _body({}, labels={"what": "tflops"}), b'{"tflops'):
        if body.startswith(b'{"tflops'):
            with pytest.raises(Refused):
                resolved(body, here)
        else:
            assert resolved(body, here) is body


@pytest.mark.parametrize("json", [True, False])
def test_the_form_of_a_request_stays(here: str, json: bool) -> None:
    body = encode(decode_request(_body({"tflops": "78"}, job="j")), json=json)
    found = resolved(body, here)
    assert (found[:1] == b"{") is json
    assert decode_request(found).job == "j"


@pytest.mark.parametrize(
    "share", [{"tflops": "30", "compute_percent": 40}, {"tflops": "0"}, {"tflops": "0m"}, {"tflops": "30T"}]
)
def test_what_is_no_part_in_tflops_is_refused(here: str, share: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        resolved(_body(share), here)


def test_the_engine_takes_no_request_whose_tflops_nothing_resolved() -> None:
    with pytest.raises(Refused, match="not resolved"):
        Driving().engine.reader.read(_body({"tflops": "30"}))


def test_the_token_says_tflops() -> None:
    for token in ("1xL40S@mps=30tflops", "1xL40S@time-slice=500mtflops,4G"):
        assert format_token(parse_token(token)[1]) == token
    with pytest.raises(ValueError, match="say the same"):
        parse_token("1xL40S@mps=30tflops,50%")


def test_the_file_of_capacities_takes_the_place_of_the_known_models(tmp_path: Path) -> None:
    assert read_capacities("") is CAPACITIES
    file = tmp_path / "tflops.toml"
    file.write_text('[tflops]\n"NVIDIA B200" = 2250\n"odd" = 0.5\n')
    assert read_capacities(str(file)) == {"NVIDIA B200": 2250, "odd": 0.5}


@pytest.mark.parametrize(
    "text",
    [
        "", "[tflops]\n", "[other]\n", "[tflops]\na = 1\n[more]\n", "tflops = 3", "[tflops]\na = 0",
        "[tflops]\na = true",
        "[tflops]\na = inf", "[tflops]\na = '3'", "[tflops]\na = 1e7", "[tflops\n", "[tflops]\n" + "a" * 129 + " = 1",
        "[tflops]\n" + "".join(f"m{number} = 1\n" for number in range(1_001)), "#" * 70_000,
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_of_capacities_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tflops.toml"
    file.write_text(text)
    with pytest.raises(Refused) as refused:
        read_capacities(str(file))
    assert refused.value.code == "bad-settings"
    assert str(file) in refused.value.problem.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        read_capacities(str(tmp_path / "none"))


def test_every_known_model_is_one_by_its_whole_name() -> None:
    assert all(0 < capacity <= TFLOPS_MAX for capacity in CAPACITIES.values())
    for model in CAPACITIES:
        assert b"tflops" not in resolved(_body({"tflops": "1"}, f"={model}"))


def test_what_comes_in_on_the_endpoint_has_its_percentage_in_the_ledger() -> None:
    drive, answers = Driving(), dict[str, bytes]()
    intake = Intake(drive.engine, SUBJECTS, answers.__setitem__, answers.__setitem__, lambda *_: None, lambda *_: None)
    subject = SUBJECTS.api("t", "submit")
    for name, model in (("j", "H100 80GB"), ("k", "nobody")):
        intake.put(Delivery(subject, f"_INBOX.{name}", _body({"tflops": "494.7"}, model, job=name)))
    intake.put(Delivery(subject, "_INBOX.batch", b"[" + _body({"tflops": "98.94"}, "H100 80GB", job="one") + b"]"))
    intake.drain(drive.now)
    drive.tick()
    assert b"how many TFLOPS nobody has" in answers["_INBOX.k"]
    for name, percent in (("j", 50), ("one", 10)):
        job = drive.state.job("t", name)
        assert job is not None
        gpu = decode_request(job.body).gpu
        assert gpu is not None
        assert gpu.share == Share(0, percent)
