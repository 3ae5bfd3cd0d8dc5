"""Spans of OpenTelemetry for calls, in a process that has loaded its package `opentelemetry.trace`; none in any other.

moorage does not import that package by itself: a process that exports spans has loaded it, and no other needs it. A
span goes from the caller to the member in the header `traceparent` (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

_TRACER: Final = "moorage"


def caller_span(
    name: str, attributes: Mapping[str, str], told: Callable[[], Mapping[str, str | int]] = dict
) -> AbstractContextManager[dict[str, str]]:
    """Return a span for one request. The block gets the headers of the request, with which the other side continues it.

    At its end the span has the attributes that `told` returns as well, and the code of its error. It is not the current
    span of the block: that may be left in another context than it was entered, as by a generator.
    """
    return _caller_span(name, attributes, told) if "opentelemetry.trace" in sys.modules else nullcontext({})


@contextmanager
def _caller_span(
    name: str, attributes: Mapping[str, str], told: Callable[[], Mapping[str, str | int]]
) -> Iterator[dict[str, str]]:
    from opentelemetry import propagate, trace

    span = trace.get_tracer(_TRACER).start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)
    headers: dict[str, str] = {}
    propagate.inject(headers, trace.set_span_in_context(span))
    try:
        yield headers
    except Exception as error:
        span.record_exception(error)
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        span.set_attribute("error.type", getattr(error, "code", "") or type(error).__name__)
        raise
    finally:
        span.set_attributes(told())
        span.end()


def served_span(
    name: str, callers: Sequence[Mapping[str, str]], attributes: Mapping[str, str]
) -> AbstractContextManager[None]:
    """Return a span for what answers calls with these headers, and for all spans that begin in the block.

    It belongs to the trace of its caller. For several it is a trace of its own, with a link to each.
    """
    return _served_span(name, callers, attributes) if "opentelemetry.trace" in sys.modules else nullcontext()


@contextmanager
def _served_span(name: str, callers: Sequence[Mapping[str, str]], attributes: Mapping[str, str]) -> Iterator[None]:
    from opentelemetry import propagate, trace

    contexts = [propagate.extract({key.lower(): value for key, value in headers.items()}) for headers in callers]
    parent, links = contexts[0], []
    if len(contexts) > 1:
        spans = [trace.get_current_span(context).get_span_context() for context in contexts]
        parent, links = type(parent)(), [trace.Link(span) for span in spans if span.is_valid]
    with trace.get_tracer(_TRACER).start_as_current_span(name, parent, trace.SpanKind.SERVER, attributes, links):
        yield
