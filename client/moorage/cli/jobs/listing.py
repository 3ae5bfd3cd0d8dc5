"""The question behind `moorage ls`, asked once or again and again, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from moorage.cli.jobs.job_rows import jobs_table, no_jobs, rank
from moorage.cli.jobs.selectors import HELD

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.answers.jobs import JobRow
    from moorage.schemas.frames import Answer

#: what --tenant says for all tenants
ALL_TENANTS: Final = "all"


class Listing:
    """The question of one `ls`, asked once or again and again."""

    def __init__(self, client: AsyncClient, asked: Mapping[str, Any]) -> None:
        self._client = client
        self._asked = asked
        self.of_all = client.tenant == ALL_TENANTS
        self._limit: int = asked.get("limit", 100)

    @property
    def states(self) -> list[str]:
        states: list[str] = self._asked.get("states", [])
        return states

    @property
    def reason(self) -> str:
        reason: str = self._asked.get("reason", "")
        return reason

    async def ask(self, *, runs_first: bool = False) -> Answer:
        """Return the answer, with the jobs of further pages up to the limit.

        With `runs_first`, jobs that hold GPUs are among them however old they are, and are sorted first.
        """
        answer = await self._page({})
        data, rows = answer.data, list(answer.data["jobs"])
        while len(rows) < self._limit and (after := data.get("next", "")):
            data = (await self._page({"after": after, "limit": self._limit - len(rows)})).data
            rows += data["jobs"]
        answer.data["jobs"] = rows = _once(rows)
        if not data.get("next"):
            answer.data.pop("next", None)
        else:
            answer.data["next"] = data["next"]
        if runs_first:
            if not self.states and not self.reason and data.get("next", "").startswith("m:"):
                held = (await self._page({"states": HELD})).data["jobs"]
                rows = _once([*held, *rows])
            answer.data["jobs"] = sorted(rows, key=lambda row: rank(row["state"]))[: self._limit]
        return answer

    async def _page(self, more: Mapping[str, Any]) -> Answer:
        arguments = {**self._asked, **more}
        if self.of_all:
            return await self._client._wire.operate("ls", arguments)
        return await self._client._wire.answer("ls", arguments)

    def table(self, rows: Sequence[JobRow]) -> str:
        return jobs_table(rows, of_all=self.of_all)

    def none(self) -> str:
        """Return that there is no such job, and what was asked for."""
        asked = self._asked
        labels = asked.get("labels", {})
        words = [f"--label {key}" if value == "*" else f"--label {key}={value}" for key, value in labels.items()]
        words += [asked["ids"]] if asked.get("ids") else []
        words += [f"--{name} {asked[name]}" for name in ("worker", "reason") if asked.get(name)]
        tenant = "any tenant" if self.of_all else f"tenant {self._client.tenant}"
        return no_jobs(tenant, self.states, words, history=bool(asked["history"]))


def _once(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, of each job the first: a job that left memory between two pages comes twice."""
    return list({(row["tenant"], row["job"]): row for row in reversed(rows)}.values())[::-1]
