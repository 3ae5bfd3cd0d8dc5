"""Whether this machine is about to be interrupted, as it is told by a file, an answer over HTTP, a cloud's metadata.

What the clouds say is data here, without a library of theirs. A machine that is interrupted ends in half a minute to
two: until then its jobs can be told, and moved.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

#: how often it is looked, in seconds, and how long one look may take
LOOK_EVERY_S: Final = 2.0
LOOK_S_MAX: Final = 2.0
#: an answer is read as far as this
BODY_BYTES_MAX: Final = 65_536
#: a time further ahead is not believed: the machine's clock may be wrong
AHEAD_S_MAX: Final = 3_600.0
_TIMES: Final = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z"), datetime.fromisoformat),  # RFC 3339
    (re.compile(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT"), parsedate_to_datetime),  # RFC 1123
)

log = logging.getLogger("moorage.worker")


class Form(NamedTuple):
    """How a cloud tells it: where it is asked, with which headers, and which part of the answer is a notice.

    `token` is asked first by PUT, with `token_asks`, for what is then sent as the header `token_is`. `name` is where
    the machine's own name is asked, which the notice has to contain. `left_s` is what the machine has if no time is
    told.
    """

    base: str = ""
    path: str = ""
    headers: Mapping[str, str] = MappingProxyType({})
    notice: re.Pattern[str] = re.compile("", re.DOTALL)
    left_s: float = 30.0
    token: str = ""
    token_asks: Mapping[str, str] = MappingProxyType({})
    token_is: str = ""
    name: str = ""


_METADATA: Final = {"Metadata": "true"}
FORMS: Final = {
    "aws": Form(
        "http://169.254.169.254", "/latest/meta-data/spot/instance-action", left_s=120.0,
        notice=re.compile(r'"action"\s*:\s*"(?:terminate|stop|hibernate)"'),
        token="/latest/api/token",
        token_asks={"X-aws-ec2-metadata-token-ttl-seconds": "60"}, token_is="X-aws-ec2-metadata-token",
    ),
    "google": Form(
        "http://metadata.google.internal", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"},
        re.compile(r"\ATRUE\b"),
    ),
    "azure": Form(
        "http://169.254.169.254", "/metadata/scheduledevents?api-version=2020-07-01", _METADATA,
        re.compile(r'\{[^{}]*"EventType"\s*:\s*"(?:Preempt|Terminate|Reboot|Redeploy)"[^{}]*\}'),
        name="/metadata/instance/compute/name?api-version=2021-02-01&format=text",
    ),
}  # fmt: skip


class Interruption:
    """Looks at one place, named by the setting `notice`: a file, an http address, or a cloud, as `aws`.

    `aws=http://10.0.0.1:8000` asks another address in the cloud's form.
    """

    def __init__(self, where: str) -> None:
        cloud, _, base = where.partition("=")
        form = FORMS.get(cloud)
        self._file = None if form is not None or is_address(where) else Path(where)
        self.form = Form(where) if form is None else form._replace(base=base or form.base)
        self._name = ""
        self._is_told = False
        # no proxy: the addresses are the machine's own
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    async def wait(self, *, is_over: bool = False) -> float:
        """Wait until there is a notice, and return the seconds that are left; with `is_over`, until there is none."""
        while True:
            left_s = await asyncio.to_thread(self.look)
            if (left_s is None) == is_over:
                return left_s or 0.0
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> float | None:
        """Return for how many seconds this machine goes on, by a notice; None without one, or if it cannot be read."""
        try:
            return self._read()
        except (OSError, ValueError) as error:
            if not self._is_told:
                log.warning("notice: whether this machine is to be interrupted cannot be read: %s", error)
            self._is_told = True
            return None

    def _read(self) -> float | None:
        form = self.form
        if self._file is not None:
            try:
                with self._file.open(encoding="utf-8", errors="replace") as file:
                    return self._left_s(file.read(BODY_BYTES_MAX))
            except FileNotFoundError:
                return None
        headers = dict(form.headers)
        if form.token:
            headers[form.token_is] = self._get(form.token, form.token_asks, "PUT") or ""
        if form.name and not self._name:
            self._name = (self._get(form.name, headers) or "").strip()
        body = self._get(form.path, headers)
        mine = json.dumps(self._name) if form.name else ""
        found = next((each for each in form.notice.finditer(body or "") if mine in each[0]), None)
        return None if body is None or found is None else self._left_s(found[0] if form.name else body)

    def _get(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """Return the answer; None for 404 and 410, as where nothing is to come. Raises OSError, ValueError."""
        request = urllib.request.Request(self.form.base + path, headers=dict(headers), method=method)
        try:
            with self._open(request, timeout=LOOK_S_MAX) as answer:
                return str(answer.read(BODY_BYTES_MAX).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                return None
            raise

    def _left_s(self, text: str) -> float:
        for pattern, read in _TIMES:
            if (found := pattern.search(text)) is not None:
                left_s = read(found[0]).astimezone(UTC).timestamp() - time.time()
                return left_s if 0 < left_s <= AHEAD_S_MAX else self.form.left_s
        return self.form.left_s


def is_address(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def check_notice(where: str) -> None:
    """Raise ValueError for a place that is none."""
    cloud, equals, base = where.partition("=")
    is_cloud = cloud in FORMS and (is_address(base) if equals else True)
    if where and not (is_cloud or is_address(where) or where.startswith("/")):
        raise ValueError(
            f"notice must be the whole path of a file, an address http://…, or {', '.join(FORMS)}, found {where[:80]!r}"
        )


def leave_s_of(left_s: float, grace_s: float) -> float:
    """Return for how long services may go on: the graces come after that, but half of the time is theirs at most."""
    return max(left_s / 2, left_s - grace_s)
