"""Calls as spans of OpenTelemetry: from the caller's, by `traceparent`, to those of a Python function."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from moorage.calls.function import serve_async, serve_plain
from moorage.calls.served import Served
from moorage.calls.wire import ToProgram, frame
from moorage.client import AsyncClient, CallFailed, Client
from tests.system.services.members import member


@pytest.fixture(name="spans")
def _spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What this process exports."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def ids(span: ReadableSpan) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


async def test_a_call_is_a_span_and_its_function_runs_in_a_span_below_it(
    nats_url: str, unique: str, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    target = ("functions:Traced", "--name", "traced")
    told: list[Any] = []

    def call() -> None:
        with Client(nats_url, tenant="default", prefix=unique, timeout="30s") as moorage:
            told.append(moorage.call("traced"))

    async with (
        member(nats_url, tmp_path, *target, prefix=unique) as one,
        AsyncClient(nats_url, tenant="default", prefix=unique, timeout="30s") as moorage,
    ):
        await one.ready()
        with trace.get_tracer("test").start_as_current_span("request"):
            told += [await moorage.call("traced"), *[part async for part in moorage.service("traced").stream()]]
            await asyncio.to_thread(call)
            with pytest.raises(CallFailed):
                await moorage.call("traced", "fail")
    *called, failed, request = spans.get_finished_spans()
    assert [(span.name, span.kind) for span in called] == [("call traced", trace.SpanKind.CLIENT)] * 3
    assert told == [["functions:Traced", *ids(span)] for span in called]
    assert {ids(span)[0] for span in (*called, failed)} == {ids(request)[0]}, "one trace, also from another thread"
    own = dict(failed.attributes or {})
    assert len(str(own.pop("moorage.member"))) == 16
    assert own == {"moorage.tenant": "default", "moorage.service": "traced", "error.type": "call-failed"}
    ran = [(span.attributes or {}) for span in called]
    assert {(type(each.get("moorage.waited_ms")), type(each.get("moorage.ran_ms"))) for each in ran} == {(int, int)}
    assert (failed.status.status_code, "as asked" in (failed.status.description or "")) == (
        trace.StatusCode.ERROR,
        True,
    )


@pytest.mark.parametrize("callers", [1, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_is_one_span_with_a_link_to_each_caller(
    callers: int, is_async: bool, spans: InMemorySpanExporter
) -> None:
    async def later(data: list[bytes]) -> list[bytes]:
        return same(data)

    def same(data: list[bytes]) -> list[bytes]:
        with trace.get_tracer("test").start_as_current_span("within"):
            return data

    member, program = socket.socketpair()
    with member:
        for number in range(1, callers + 1):
            headers = {"Traceparent": f"00-{number:032x}-{number:016x}-01"}
            member.sendall(frame(ToProgram(number, headers=headers, more=number < callers)))
        member.sendall(frame(ToProgram(end=True)))
        if is_async:
            asyncio.run(serve_async(Served(later, "m:later", in_batches=True), program, 1))
        else:
            with program:
                serve_plain(Served(same, "m:same", in_batches=True), program, 1)
    within, batch = spans.get_finished_spans()
    assert within.parent == batch.context
    assert [link.context.span_id for link in batch.links] == ([] if callers == 1 else [1, 2, 3])
    assert (batch.parent.span_id if batch.parent else None) == (1 if callers == 1 else None)


def test_a_call_without_a_span_begins_a_trace_and_a_wrong_header_is_none(spans: InMemorySpanExporter) -> None:
    member, program = socket.socketpair()
    with member, program:
        for number, headers in enumerate(({}, {"traceparent": "none"}), 1):
            member.sendall(frame(ToProgram(number, headers=headers)))
        member.sendall(frame(ToProgram(end=True)))
        serve_plain(Served(len, "m:len"), program, 1)
    assert [(span.name, span.parent) for span in spans.get_finished_spans()] == [("m:len", None)] * 2
