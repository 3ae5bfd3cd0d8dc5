"""What callers may reach of a server behind a service, and which headers go on."""

from __future__ import annotations

import pytest

from moorage.schemas.http_service import (
    TARGET_BYTES_MAX,
    HttpRequest,
    HttpSpec,
    engine_load,
    models_trouble,
    passed_on,
    path_refused,
    target_trouble,
)

PATHS = ("/v1/*", "/generate")


@pytest.mark.parametrize(
    "target",
    ["/v1/chat/completions", "/v1/", "/v1/models?x=/../y", "/generate", "/generate?a=%2e%2e", "/v1/a%2Fb", "/v1/a%20b"],
)
def test_what_is_allowed_passes_as_it_came(target: str) -> None:
    assert path_refused("POST", target, PATHS) == ""


@pytest.mark.parametrize(
    "target",
    [
        "/sleep",
        "/generate/x",
        "/v1",
        "/V1/models",
        "",
        "v1/models",
        "*",
        "http://other/v1/models",
        "//other/v1/models",
        "/v1/../sleep",
        "/v1/./x",
        "/v1/..",
        "/v1/%2e%2e/sleep",
        "/v1/%2E%2E/sleep",
        "/v1/.%2e/sleep",
        "/v1/..%2fsleep",
        "/v1%2f..%2fsleep",
        "/v1/%2e%2e%2fsleep",
        "/v1//sleep",
        "/v1/%2fsleep",
        "/v1/%252e%252e/sleep",
        "/v1/..\\sleep",
        "/v1/..%5csleep",
        "/v1/x\r\nHost: y",
        "/v1/x%0d%0ay",
        "/v1/x%00",
        "/v1/x#y",
        "/v1/x y",
        "/v1/ü",
        "/v1/" + "x" * TARGET_BYTES_MAX,
    ],
)
def test_no_spelling_of_another_path_passes(target: str) -> None:
    assert path_refused("POST", target, PATHS) != ""


@pytest.mark.parametrize("method", ["", "CONNECT", "TRACE", "get", "GET\r\nX: y", "G" * 17])
def test_a_method_is_one_of_a_resource(method: str) -> None:
    assert path_refused(method, "/v1/x", PATHS) != ""


def test_headers_of_one_connection_and_moorages_own_stay_here() -> None:
    given = [
        ("Connection", "keep-alive, X-Hop"), ("X-Hop", "1"), ("Transfer-Encoding", "chunked"), ("Host", "x"),
        ("Content-Length", "3"), ("Accept-Encoding", "gzip"), ("Expect", "100-continue"), ("TE", "trailers"),
        ("Moorage-Priority", "100"), ("Http-Path", "/sleep"), ("Nats-Msg-Id", "1"), ("Upgrade", "websocket"),
        ("X-Own", "a"), ("x-own", "b"), ("Inference-Header-Content-Length", "9"), ("traceparent", "t"),
    ]  # fmt: skip
    assert passed_on(given) == [
        ("X-Own", "a"), ("x-own", "b"), ("Inference-Header-Content-Length", "9"), ("traceparent", "t"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        HttpSpec("health"),
        HttpSpec("/health", path="x"),
        HttpSpec("/health", paths=()),
        HttpSpec("/health", paths=("v1/*",)),
        HttpSpec("/health", paths=("/v*/x",)),
        HttpSpec("/health", warm=HttpRequest("x")),
        HttpSpec("/health", idle_s=0.5),
        HttpSpec("/health", metrics="vLLM"),
        HttpSpec("/health", idle_s=float("nan")),
    ],
)
def test_a_wrong_field_is_named(spec: HttpSpec) -> None:
    assert spec.trouble is not None
    assert spec.trouble.field.startswith("service.http.")


def test_models_have_names() -> None:
    assert models_trouble(("Qwen/Qwen3-8B", "lora a")) is None
    for wrong in (("",), (" a",), ("a,b",), ("a\n",), ("a", "a"), ("x" * 257,), tuple(map(str, range(65)))):
        trouble = models_trouble(wrong)
        assert trouble is not None
        assert trouble.field == "service.models"
    assert target_trouble("/v1/x") == ""


def test_an_engines_load_is_the_sum_of_its_gauges_and_none_where_it_says_none() -> None:
    vllm = (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="a b"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="a b"} 4.0 1712345678\n'
        'vllm:num_requests_waiting{engine="0",model_name="a b"} 5.0\nvllm:num_requests_waiting_for{x="1"} 9\n'
    )
    assert engine_load(vllm, "vllm") == (7, 5)
    assert engine_load("llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n", "llama.cpp") == (2, 1)
    for text in ("", vllm.replace("waiting", "other"), "vllm:num_requests_running{} x\nvllm:num_requests_waiting{} 1"):
        assert engine_load(text, "vllm") is None
    assert engine_load(vllm.replace(" 5.0", " NaN"), "vllm") is None
