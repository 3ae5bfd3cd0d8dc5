"""The token `3x2xH100|A100:80G@mps=50%,4G`: read, written, and refused with its part named."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.schemas.gpu import (
    GpuSpec,
    Share,
    Sharing,
    as_one_replica,
    format_token,
    model_matches,
    nominal_mib,
    parse_token,
)


@pytest.mark.parametrize(
    ("token", "replicas", "spec"),
    [
        ("H100", 1, {"model": "H100"}),
        ("2xH100", 1, {"count": 2, "model": "H100"}),
        ("3x2xH100", 3, {"count": 2, "model": "H100"}),
        ("2", 1, {"count": 2}),
        ("3x2xany", 3, {"count": 2}),
        ("1xany", 1, {}),
        ("1xTITAN", 1, {"model": "TITAN"}),
        ("A100|any", 1, {"model": ["A100", "any"]}),
        ("any:24G", 1, {"min_memory_mib": nominal_mib(24)}),
        ("2xH100:80G", 1, {"count": 2, "model": "H100", "min_memory_mib": nominal_mib(80)}),
        ("1xH100:70000M", 1, {"model": "H100", "min_memory_mib": 70_000}),
        ("1xH100|A100", 1, {"model": ["H100", "A100"]}),
        ("1x=A10", 1, {"model": "=A10"}),
        ("1xRTX 4090", 1, {"model": "RTX 4090"}),
        ("1xL40S@mps", 1, {"model": "L40S", "sharing": "mps"}),
        ("1xL40S@mps=50%", 1, {"model": "L40S", "sharing": "mps", "share": Share(0, 50)}),
        ("1xL40S@time-slice=4000M", 1, {"model": "L40S", "sharing": "time-slice", "share": Share(4_000, 100)}),
        ("1xL40S@mps=50%,4G", 1, {"model": "L40S", "sharing": "mps", "share": Share(3814, 50)}),
        ("1xT4@exclusive", 1, {"model": "T4", "sharing": "exclusive"}),
        (" 2xH100 ", 1, {"count": 2, "model": "H100"}),
    ],
)
def test_read(token: str, replicas: int, spec: dict[str, Any]) -> None:
    assert parse_token(token) == (replicas, GpuSpec(**spec))


@pytest.mark.parametrize(
    "token",
    [
        "", " ", "0xH100", "65xH100", "2xH100:80", "2xH100:80T", "2xH100@", "2xH100@fast", "2xH100@mps=",
        "1xH100@mps=0%",
        "1xH100@mps=101%", "1xH100@exclusive=50%", "1xH100@mps=5", "1x|", "1xH100|", "-1xH100", "1xH100:G",
        "1x2x3xH100", "lots", "True", "H100|lots", "lots:80G",
        "2x4090",
        "1xH100:80G:80G", "1xH100@mps@mps", "²xH100", "²", "1xH100@mps=" + "9" * 5000 + "%", "9" * 5000 + "xH100",
    ],
)  # fmt: skip
def test_refused_with_a_value_error(token: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_token(token)
    assert str(caught.value)


@pytest.mark.parametrize(
    "token", ["1xH100:" + "9" * 400 + "G", "1xH100:" + "9" * 400 + "M", "1xH100@mps=" + "9" * 400 + "G"]
)
def test_monstrous_memory_is_a_value_error_too(token: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_token(token)


@pytest.mark.parametrize(
    ("gigabytes", "shows_mib"),
    [(80, 81_559), (48, 46_068), (16, 15_100), (24, 23_028), (40, 40_960), (141, 143_771)],
)
def test_nominal_memory_takes_the_card_that_is_sold_so(gigabytes: int, shows_mib: int) -> None:
    assert nominal_mib(gigabytes) <= shows_mib
    assert nominal_mib(gigabytes * 1.25) > shows_mib


@pytest.mark.parametrize(
    ("spec", "replicas", "text"),
    [
        (None, 1, "-"),
        (None, 4, "4x-"),
        (GpuSpec(), 1, "1xany"),
        (GpuSpec(count=2, model="H100", min_memory_mib=nominal_mib(80)), 3, "3x2xH100:80G"),
        (GpuSpec(model=["H100", "A100"], min_memory_mib=70_000), 1, "1xH100|A100:70000M"),
        (GpuSpec(sharing="mps", share=Share(4_000, 50)), 1, "1xany@mps=50%,4000M"),
        (GpuSpec(sharing="time-slice", share=Share(9_536)), 1, "1xany@time-slice=10G"),
        (GpuSpec(sharing="time-slice", share=Share()), 1, "1xany@time-slice"),
    ],
)
def test_written(spec: GpuSpec | None, replicas: int, text: str) -> None:
    assert format_token(spec, replicas) == text


@pytest.mark.parametrize(("token", "text"), [("2x8xH100:80G", "16xH100:80G"), ("64x8xH100", "64xH100")])
def test_the_gpus_of_all_replicas_can_be_asked_for_as_one(token: str, text: str) -> None:
    replicas, spec = parse_token(token)
    assert as_one_replica(spec, replicas) == text


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("1XA100", "1xA100"),
        ("1 xA100", "1xA100"),
        ("1 x A100", "1xA100"),
        ("2 X 4 x A100", "2x4xA100"),
        ("1xA100:80GB", "1xA100:80G"),
        ("1xA100:80g", "1xA100:80G"),
        ("1xA100:80gb", "1xA100:80G"),
        ("1xA100:80GiB", "1xA100:80281M"),  # as sold, too: the card shows 2 % less
        ("1xA100:80Gi", "1xA100:80281M"),
        ("1xA100:500MiB", "1xA100:500M"),
        ("1xA100@mps=4GiB", "1xA100@mps=4096M"),
        ("1xA100@mps=4GB,50%", "1xA100@mps=50%,4G"),
        ("1x~MI300", "1x~MI300"),
        ("1x", "1xany"),
        ("3x2x", "3x2xany"),
    ],
)
def test_other_ways_to_write_a_token_are_read(token: str, meant: str) -> None:
    assert parse_token(token) == parse_token(meant)


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("2x2x2xA100", "two numbers are replicas and GPUs of each, as in 3x2xA100"),
        ("gpu=2", "did you mean 2"),
        ("gpus:2", "did you mean 2"),
        ("3x2", "a model is missing: 3x2xany"),
        ("1xA100,L40S", "alternatives are split by |: did you mean 1xA100|L40S"),
        ("0.5", "a part of a GPU is a share of it: 1xany@mps=50%"),
        (".25xH100", "a part of a GPU is a share of it: 1xH100@mps=25%"),
        ("1xA100:80", "memory has a unit: 1xA100:80G"),
        ("A100:8", "a count stands in front: 8xA100; and memory has a unit: A100:8G"),
        ("1xA100:80X", "the unit of memory is G or M, found 'X'"),
        ("model=A100", "a model has no =; it looks like 2xH100:80G, 3x2xA100 or 1xL40S@mps=50%"),
    ],
)
def test_a_token_that_cannot_be_meant_is_told_one_that_reads(token: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"; {re.escape(told)}$"):
        parse_token(token)
    for word in re.findall(r"[0-9a-zA-Z]+[x:][^ ;,]+|(?<=mean )\d+", told):
        parse_token(word)


@pytest.mark.parametrize("token", ["2H100", "2 H100", "3x2H100"])
def test_a_number_that_is_joined_to_the_model_is_told_the_x(token: str) -> None:
    with pytest.raises(ValueError, match=r"did you mean (3x)?2xH100$"):
        parse_token(token)


@pytest.mark.parametrize("token", ["1xH100@timeslice=10G", "@timeslice", "L40S:40G@timeslice"])
def test_a_mistyped_sharing_mode_is_told_those_that_there_are(token: str) -> None:
    with pytest.raises(ValueError, match=r"'timeslice' is not a sharing mode: exclusive, mps, time-slice$"):
        parse_token(token)


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("xH100", "1xH100"),
        ("xa100:80G", "1xa100"),
        ("H100x2", "2xH100"),
        ("L40S x4", "4xL40S"),
        ("L4|H100x2", "2xH100"),
    ],
)
def test_a_count_that_stands_where_none_is_read_is_told_where_it_goes(token: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"did you mean {meant}$"):
        parse_token(token)


@pytest.mark.parametrize(
    "model",
    ["RTX 4090", "rtx4090", "GTX1080", "gtx 1080", "RTX 2080 Max-Q", "A100-SXM4-80GB", "MI250X", "MI300x",
     "Drive PX2", "gx10", "Xe2", "=xH100", "=H100x2"],
)  # fmt: skip
def test_a_model_with_an_x_in_its_name_is_one(model: str) -> None:
    assert parse_token(model)[1].models == (model,)


def test_with_a_count_any_model_may_be_named() -> None:
    assert parse_token("1xxH100")[1].models == ("xH100",)
    assert parse_token("2xH100x2")[1].models == ("H100x2",)


specs = st.builds(
    GpuSpec,
    count=st.integers(1, 64),
    model=st.one_of(
        st.none(),
        st.sampled_from(["H100", "=A10", "RTX 4090"]),
        st.lists(st.sampled_from(["H100", "A100", "=L4"]), min_size=2, max_size=3),
    ),
    min_memory_mib=st.one_of(st.none(), st.integers(1, 200_000), st.integers(1, 200).map(nominal_mib)),
    sharing=st.sampled_from([None, "mps", "time-slice"]),
)
shares = st.builds(Share, st.one_of(st.just(0), st.integers(1, 200_000)), st.integers(1, 100))


@given(shares, st.sampled_from(["mps", "time-slice"]))
def test_a_share_that_is_written_reads_back(share: Share, sharing: Sharing) -> None:
    spec = GpuSpec(sharing=sharing, share=share)
    assert (parse_token(format_token(spec))[1].share or Share()) == share


@given(specs, st.integers(1, 1024))
def test_what_is_written_reads_back(spec: GpuSpec, replicas: int) -> None:
    text = format_token(spec, replicas)
    again_replicas, again = parse_token(text)
    assert (again_replicas, again.count, again.models, again.sharing) == (
        replicas,
        spec.count,
        spec.models,
        spec.sharing,
    )
    assert again.min_memory_mib == spec.min_memory_mib


@given(st.text(alphabet="0123456789xXHAaLS|:=@.,%GMmpsti-e \n²", max_size=24))
def test_any_text_reads_or_is_a_value_error(token: str) -> None:
    try:
        replicas, spec = parse_token(token)
    except ValueError:
        return
    assert spec.count >= 1
    assert replicas >= 0


@given(st.text(max_size=12), st.text(max_size=20))
def test_matching_is_total_and_case_is_nothing(pattern: str, name: str) -> None:
    rank = model_matches(pattern, name)
    assert rank in (0, 1, 2)
    if name and pattern.isascii() and name.isascii():
        assert rank == model_matches(pattern.upper(), name.lower())


def test_more_gpus_than_a_replica_may_have_are_a_gang() -> None:
    with pytest.raises(ValueError, match=r"count must be 1\.\.64 \(more are replicas of a gang, .*--gang\), found 128"):
        parse_token("128xH100")
