"""The server of the page: HTML for each address, and the parts that change as server-sent events. A browser needs
neither a key nor NATS, and loads nothing from elsewhere.

Starlette and not NiceGUI: NiceGUI brings some forty packages, keeps each tab's elements on the server, draws for every
tab, and opens its socket to pages of any origin. What it would save is the file page.js, of some forty lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from moorage.cli.framework.console import error_line
from moorage.cli.page import acts, draw, draw_series, draw_service, draw_waits
from moorage.cli.page.doors import Doors
from moorage.cli.page.source import PICTURE_S, Source
from moorage.cli.page.templates import Part, drawn
from moorage.client.durations import seconds
from moorage.client.errors import Rejected
from moorage.client.view.view import View
from moorage.schemas.errors import MoorageError
from moorage.schemas.names import is_job, is_service, is_tenant, is_worker
from moorage.schemas.waited import SeriesAnswer

#: browsers that are told at a time; further ones have to come again
STREAMS_MAX: Final = 128
#: a stream that has nothing to tell says so, and a page that hears nothing dims itself
BEAT_S: Final = 5.0
#: how long the first picture of numbers over time waits for them: the stream brings what takes longer
AT_ONCE_S: Final = 0.2
#: charts of the past that are kept as they were drawn: of 300 tenants that takes longer than all other views
PASTS_MAX: Final = 64
#: pages that have a past: others show what is now
OF_A_MOMENT: Final = ("/", "/queue")
SINCE_DEFAULT: Final = "7d"
#: waits are shown over four weeks at least
WAITS_S_MIN: Final = 28 * 86_400
BY_DEFAULT: Final = "tenant,model"
BY: Final = ("tenant", "model", "hour")
_FILES: Final = {name: Path(__file__).with_name(name) for name in ("page.js", "page.css")}
_SAFE: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self';"
    " img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Answerer = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("moorage.page")


class Page:
    """The application. `operates` lets those who may enter act, too; `shown` is the URL of the page for people."""

    def __init__(self, source: Source, doors: Doors, shown: str, *, operates: bool) -> None:
        self._source = source
        self._doors = doors
        self._operates = operates
        self._shown = shown
        self._streams = 0
        self._drawn: dict[str, tuple[float, list[Part]]] = {}
        self._pasts: dict[tuple[str, str], tuple[SeriesAnswer, list[Part]]] = {}  # by span and tenant
        #: set when the server ends: streams end then
        self.ends = asyncio.Event()

    @property
    def link(self) -> str:
        """The link by which a browser enters."""
        return f"{self._shown}?key={self._doors.key}" if self._source.private else self._shown

    def app(self) -> Starlette:
        """Return the application for a server."""
        return Starlette(
            routes=[
                *(Route(f"/static/{name}", self._static) for name in _FILES),
                Route("/live{at:path}", self._guarded(self._live)),
                Route("/act", self._guarded(self._act), methods=["POST"]),
                Route("/{at:path}", self._guarded(self._page)),
            ]
        )

    def _guarded(self, answer: Answerer) -> Answerer:
        """Return an answerer that lets in who may see the page, and has the browser load only what is here."""

        async def guarded(request: Request) -> Response:
            self._look_at_secrets()
            if self._doors.is_rebound(request):
                told = f"this page is at {self._doors.names} alone\n"
                response: Response = PlainTextResponse(told, 421)
            elif self._doors.opens(request):
                response = RedirectResponse(request.url.path, 303)
                self._doors.let_in(request, response)
            elif self._source.private and not self._doors.may_enter(request):
                told = "open the link that `moorage page` printed when it began: it has the secret of this page\n"
                response = PlainTextResponse(told, 403)
            else:
                response = await answer(request)
            response.headers.update(_SAFE)
            return response

        return guarded

    def _look_at_secrets(self) -> None:
        if self._doors.renewed():
            log.info("all browsers are logged out; page at %s", self.link)

    async def _static(self, request: Request) -> Response:
        """Send a file of this package: it holds nothing of the fleet."""
        return FileResponse(_FILES[request.url.path.rpartition("/")[2]], headers=_SAFE)

    # ------------------------------------------------------------------------------------------------------ pages

    async def _page(self, request: Request) -> Response:
        async with self._source.watching():
            at = f"/{request.path_params['at']}"
            if at == "/" and not self._source.feed.model.sees_fleet:  # a tenant's key: its jobs are what there is
                query = f"?{request.url.query}" if request.url.query else ""
                return RedirectResponse(f"/queue{query}", 303)
            return await self._document(at, request)

    async def _document(self, at: str, request: Request) -> Response:
        is_soon = at == "/past" and "print" not in request.query_params  # a report is printed as it is drawn first
        parts = await self._parts(at, request, AT_ONCE_S if is_soon else None)
        if parts is None:
            return PlainTextResponse("no such page\n", 404)
        fixed = self._fixed(at, request)
        title = f"moorage {at.strip('/') or 'fleet'}"
        feed = self._source.feed
        tabs = draw.tabs(sees_fleet=feed.model.sees_fleet, private=self._source.private, operates=feed.operates)
        return HTMLResponse(draw.document(at, parts, tabs=tabs, title=title, fixed=fixed))

    async def _live(self, request: Request) -> Response:
        if self._streams >= STREAMS_MAX:
            return PlainTextResponse(f"{STREAMS_MAX} browsers are told already\n", 503)
        at = request.path_params["at"]
        if await self._parts(at, request) is None:
            return Response(status_code=204)  # a browser does not come again after that
        return StreamingResponse(self._changed_parts(at, request), media_type="text/event-stream")

    async def _changed_parts(self, at: str, request: Request) -> AsyncIterator[bytes]:
        """Yield the order of the parts and those that have changed, four times a second at most; first all of them."""
        sent: dict[str, str] = {}
        beat_s = time.monotonic()
        self._streams += 1
        try:
            async with self._source.watching():
                while not self.ends.is_set():
                    began_s = time.monotonic()
                    self._look_at_secrets()
                    if self._source.private and not self._doors.may_enter(request):
                        return
                    parts = await self._parts(at, request) or []
                    order = [each.id for each in parts if not each.inside and each.id != "head"]
                    changed = {
                        each.id: each.html
                        for each in parts
                        if sent.get(each.id) != each.key and (each.inside <= (each.id in sent))
                    }
                    left = sent.keys() - {each.id for each in parts}
                    sent = {each.id: each.key for each in parts}
                    if changed or left:
                        yield b"data: " + json.dumps({"order": order, "parts": changed}).encode() + b"\n\n"
                        beat_s = began_s
                    elif began_s - beat_s > BEAT_S:
                        yield b": still here\n\n"
                        beat_s = began_s
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(PICTURE_S - (time.monotonic() - began_s), 0.01)):
                            await self.ends.wait()
        finally:
            self._streams -= 1

    async def _parts(self, at: str, request: Request, limit_s: float | None = None) -> list[Part] | None:
        """Return the parts of a page: the same ones for all who ask within a quarter of a second; None if there is no
        such page. What is not there within `limit_s` is told to come."""
        key, now_s = f"{at}?{request.url.query}", time.monotonic()
        kept = self._drawn.get(key)
        if kept is not None and now_s - kept[0] < PICTURE_S * 0.9:
            return kept[1]
        view = self._source.view()
        ages: list[float] = []
        parts: list[Part] | None
        try:
            if (moment := request.query_params.get("at")) and at not in OF_A_MOMENT:
                parts = [draw.trouble(f"a moment of the past is shown at {' and '.join(OF_A_MOMENT)} alone")]
            elif moment and not self._source.private:
                parts = [draw.trouble("the past is not shown: that takes an operator's key, or a tenant's")]
            else:
                with self._source.ages() as ages:
                    async with asyncio.timeout(limit_s):
                        view = await self._source.past(moment) if moment else view
                        parts = await self._draw(at, request, view)
        except MoorageError as error:
            parts = [draw.trouble(error_line(error))]
        except TimeoutError:
            parts = [draw.trouble("the leader has not answered so far") if limit_s is None else draw.to_come()]
        if parts is None:
            return None
        parts = [draw.head(view, self._source.told(ages, past=view.past), late=not self._source.trouble), *parts]
        self._drawn = {each: found for each, found in self._drawn.items() if now_s - found[0] < 1}
        self._drawn[key] = now_s, parts
        return parts

    async def _draw(self, at: str, request: Request, view: View) -> list[Part] | None:
        source, query = self._source, request.query_params
        wanted = query.get("filter", "")
        match at.strip("/").split("/"):
            case [""]:
                return draw.fleet(view, wanted)
            case ["worker", _] if not view.sees_fleet:
                return [draw.trouble("the fleet is not shown: that takes an operator's key, or an observer's")]
            case ["worker", name]:
                devices = await source.devices(name)
                jobs = (await source.on_worker(name)).jobs if source.private and is_worker(name) else []
                parts = draw.worker(view, name, devices, source.load(name), source.lanes, jobs)
                if source.feed.operates and is_worker(name):
                    with contextlib.suppress(MoorageError, TimeoutError):  # what counts may be behind
                        parts.append(draw_series.of_host(await source.series(draw_series.SPANS["1d"], worker=name)))
                return parts
            case _ if not source.private:
                return [
                    draw.trouble("jobs, tenants and usage are not shown: that takes an operator's key, or a tenant's")
                ]
            case ["queue"]:
                tenant = query.get("tenant", "")
                if view.past:
                    return draw.queue(view, tenant, wanted)
                after = query.get("after", "")
                page = await source.ended(tenant, after)
                if not source.feed.operates:
                    tenant = tenant or source.client.tenant
                return draw.queue(view, tenant, wanted, draw.ended(tenant if is_tenant(tenant) else "", page))
            case ["job", tenant, name] if is_tenant(tenant) and is_job(name):
                return draw.job(await source.job_detail(tenant, name), view.at_ms)
            case ["lanes"] if not source.feed.operates:
                return [draw.trouble("who had which GPU is not shown: that takes an operator's key")]
            case ["lanes"]:
                span = query["span"] if query.get("span") in draw.SPANS else draw.SPANS[-1]
                shown, after = draw.hosts_of_lanes(view, query.get("from", ""), wanted)
                found = await asyncio.gather(*(source.devices(each.worker) for each in shown))
                return draw.lanes(view, source.lanes, list(zip(shown, found, strict=True)), after, wanted, span)
            case ["past"]:
                tenant = query.get("tenant", "") if source.feed.operates else source.client.tenant
                tenant = tenant if is_tenant(tenant) else ""
                told, span = await self._over(query.get("span", ""), tenant=tenant)
                return self._past_of(told, span, tenant)
            case ["service", tenant, name] if is_tenant(tenant) and is_service(name):
                _, span = await self._over(query.get("span", ""), tenant=tenant, service=name)
                found_service = await source.service(tenant, name, draw_series.SPANS[span])
                return draw_service.service(tenant, name, found_service, span)
            case ["usage"]:
                by = tuple(word for word in query.get("by", BY_DEFAULT).split(",") if word in BY) or BY[:1]
                rows, from_ms = await source.usage(seconds(query.get("since", SINCE_DEFAULT)), by)
                waits = await source.waits(max(seconds(query.get("since", SINCE_DEFAULT)), WAITS_S_MIN))
                return [*draw.usage(rows, from_ms, by), *draw_waits.waits(*waits)]
        return None

    def _past_of(self, told: SeriesAnswer, span: str, tenant: str) -> list[Part]:
        """Return the charts of an answer, which stay as they are for all who look until the next one comes."""
        kept = self._pasts.get((span, tenant))
        if kept is None or kept[0] is not told:
            if len(self._pasts) >= PASTS_MAX:
                self._pasts.clear()
            kept = self._pasts[span, tenant] = told, draw_series.past(told, span, tenant)
        return kept[1]

    async def _over(self, span: str, **of: str) -> tuple[SeriesAnswer, str]:
        """Return numbers over a span and its name: of a day if none is asked for, or of an hour while no step of a day
        is over."""
        asked = span if span in draw_series.SPANS else "1d"
        told = await self._source.series(draw_series.SPANS[asked], **of)
        if asked != span and not draw_series.is_known(told):
            asked = "1h"
            told = await self._source.series(draw_series.SPANS[asked], **of)
        return told, asked

    def _fixed(self, at: str, request: Request) -> Markup | None:
        """Return what stands above the parts and is not sent again: fields to type into, and forms for acts."""
        query = request.query_params
        match at.strip("/").split("/"):
            case [""] | ["queue"] | ["lanes"]:
                kept = [(name, query[name]) for name in ("tenant", "span") if name in query]
                past = self._source.private and at != "/lanes"
                wanted, moment = query.get("filter", ""), query.get("at", "")
                return drawn("forms", "search", filter=wanted, at=moment, past=past, kept=kept)
            case ["usage"]:
                return drawn("forms", "usage", since=query.get("since", SINCE_DEFAULT), by=query.get("by", BY_DEFAULT))
            case ["worker", name] if self._acts:
                return acts.form(self._doors.token(request), name, worker=name)
            case ["job", tenant, name] if self._acts:
                return acts.form(self._doors.token(request), name, tenant=tenant, job=name)
        return None

    # ------------------------------------------------------------------------------------------------------- acts

    @property
    def _acts(self) -> bool:
        """Whether orders may be given here: with --operate, and an operator's key."""
        return self._operates and self._source.feed.operates

    async def _act(self, request: Request) -> Response:
        """Do what an operator orders: only with --operate, from a form of this server, with the name typed."""
        asked = {name: values[-1] for name, values in (await _form(request)).items()}
        if not self._operates:
            return PlainTextResponse("this page only shows: it was started without --operate\n", 403)
        if not self._doors.may_act(request, asked.pop("token", "")):
            return PlainTextResponse("this order is of no form of this page: load the page again\n", 403)
        try:
            told, back = await acts.do(self._source.client, asked, self._doors.name(request))
        except MoorageError as error:
            why = [error_line(error)]
            why += [f"allowed: {error.problem.allowed}"] if error.problem.allowed else []
            why += [f"fix: {error.problem.next}"] if error.problem.next else []
            return PlainTextResponse("\n".join(why), 409 if isinstance(error, Rejected) else 502)
        log.info("%s: %s", self._doors.name(request) or "by the link", told)
        return RedirectResponse(back, 303)


async def _form(request: Request) -> dict[str, list[str]]:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > 16_384:
            return {}
    return parse_qs(body.decode(errors="replace"), max_num_fields=32)


class _Server(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(page: Page, sockets: Sequence[Any]) -> AsyncIterator[None]:
    """Serve the page on these sockets."""
    config = uvicorn.Config(
        page.app(),
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(list(sockets)))
    try:
        yield
    finally:
        page.ends.set()
        server.should_exit = True
        await task
