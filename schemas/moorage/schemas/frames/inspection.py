"""Frames of an audit: its request to every worker, and what the worker found on its host."""

from __future__ import annotations

import msgspec

from moorage.schemas.frames.version import VERSION


class Look(msgspec.Struct, frozen=True, tag_field="kind", tag="look"):
    """An audit asks every worker to look now at its devices and at what runs there.

    `ask` is a random number, which the answer repeats.
    """

    ask: int
    epoch: int = msgspec.field(name="reign")
    v: int = VERSION


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """A difference between a worker and its host. `slot` is a position in hello's `gpu_pool`.

    - `nvml-foreign`: a process (`pid`, short `name`, and `memory_mib` if the driver tells it) uses a device without a
      lease.
    - `nvml-memory`: `memory_mib` more than its idle baseline is in use on a device without a lease, and no process is
      seen there.
    - `nvml-missing`: a leased device does not answer.
    - `nothing-runs`: the worker has the attempt in `name`, but neither the supervisor nor an engine has anything of it.
      `slot` is -1, and `uuid` is empty.
    """

    kind: str
    slot: int
    uuid: str
    pid: int = 0
    name: str = ""
    memory_mib: int = 0


class Looked(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="looked"):
    """What a worker found on its host, at most 256 findings; `more` is how many were left out."""

    worker: str
    ask: int
    v: int = VERSION
    findings: list[Finding] = []
    more: int = 0
