"""The fields of a request that `submit` takes as keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypedDict

from moorage.client.durations import Duration
from moorage.schemas.items import ItemsFile
from moorage.schemas.job import After, FilesOf, GroupSpec, Resources, Secret
from moorage.schemas.retrying import Retry
from moorage.schemas.service import Scale, ServiceSpec
from moorage.schemas.staying import Ready

#: files and folders that are sent to a job's folder, and `job:ID` for the files that a job has kept
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class _RunFields(TypedDict, total=False):
    """The fields of a request's `run`."""

    driver: str
    env: Mapping[str, str | Secret]
    image: str
    cwd: str | os.PathLike[str]
    files: Paths
    files_of: Sequence[FilesOf | Mapping[str, str]]
    items: Sequence[Any] | ItemsFile | Mapping[str, str]
    keep: Sequence[str]
    setup: str
    setup_s: float
    data: Mapping[str, str | os.PathLike[str]]
    user: str
    limit: Duration
    grace_s: float
    checkpoint: str
    checkpoint_every_s: float
    checkpoint_step: str
    checkpoint_signal: str
    checkpoint_before_s: float
    stall_s: float
    on_stall: Literal["warn", "end"]
    restart: Literal["never", "on-failure", "always"]
    max_restarts: int
    restart_unready_s: float
    ready: Ready | Mapping[str, Any]
    ports: int
    calls: bool


class HasId(Protocol):
    """A handle on a job, or what is known of one: `job` is its id."""

    @property
    def job(self) -> str: ...


#: a job after which another one starts: the id of one that succeeds, a handle on it, or also which end of it counts
Earlier = str | HasId | Mapping[str, str] | After


class Fields(_RunFields, total=False):
    """The keyword arguments of `submit` beside `what`, `gpu` and `job`: fields of a request and of its `run`, as on the
    wire. Only `limit` has another name there: it is `timeout_s` of `run`, how long an attempt may run."""

    replicas: int | Scale | Mapping[str, int]
    indices: str
    max_running: int
    max_failed: int | None
    priority: int
    resources: Resources
    requires: dict[str, list[str]]
    prefers: list[str]
    same: list[str]
    spread_over: str
    each_worker: bool | Literal["once"]
    where: list[str]
    uses: dict[str, int]
    fair_key: str
    fair_weight: int
    driver_config: dict[str, Any]
    deadline_s: float
    start_within_s: float
    or_refuse: float
    retries: int
    retries_on_lost: int
    retry: Sequence[Retry | Mapping[str, Any]]
    on_partition: Literal["kill", "keep"]
    on_no_match: Literal["wait", "reject"]
    if_seq: int
    events: Literal["job", "tenant"]
    labels: dict[str, str]
    after: Earlier | Sequence[Earlier]
    start_after_s: float
    qos: Literal["low", "medium", "high", "critical"]
    preemptible: bool
    service: ServiceSpec | Mapping[str, Any]
    instead_of: str
    hold: bool
    repair_s: float
    groups: Sequence[GroupSpec | Mapping[str, Any]]


#: the names of these keyword arguments
FIELDS: Final = frozenset(Fields.__annotations__)
#: the names of those that are fields of `run`, in their order
RUN_FIELDS: Final = tuple(_RunFields.__annotations__)
