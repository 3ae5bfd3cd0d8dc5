"""Make the GPU specification of a request from a token, a count, or single values."""

from __future__ import annotations

import functools
import re
from typing import Final, Literal

import msgspec

from moorage.client.errors import rejected
from moorage.schemas.gpu import GpuSpec, Scheduling, parse_token

_MODELS: Final = re.compile(r"\s*[=~A-Za-z][^:@]*")
#: cached, because a service asks for the same GPUs again and again
_parsed: Final = functools.lru_cache(256)(parse_token)


def Gpu(
    model: str = "any",
    *,
    count: int = 1,
    memory: str | int = "",
    share: str = "",
    scheduling: Scheduling | None = None,
    distinct_hosts: bool = False,
    vendor: str | None = None,
    compute_capability: str | None = None,
    prefer: Literal["pack", "spread"] | None = None,
    topology: Literal["nvlink"] | None = None,
) -> GpuSpec:
    """Return the GPUs of one replica: `Gpu("H100 | A100", count=2, memory="80G")` is the token `2xH100|A100:80G`.

    `memory` is nominal (`80G`) or exact (`70000M`, or a number of MiB). `share` is the part of a token after its `@`:
    `time-slice`, `mps`, `mps=50%,4G`. `vendor` None means any vendor if a model is given, else nvidia.
    `compute_capability` is the lowest accepted one, as `8.0`. With `distinct_hosts`, each replica of a gang has a host
    of its own. `prefer` is for shared GPUs: `pack` chooses the fullest device with room, `spread` an unused device
    first. `topology` "nvlink" takes only GPUs that NVLink joins. Raises `Rejected`.
    """
    if not _MODELS.fullmatch(model):
        raise rejected(
            "invalid-argument",
            f"not a model: {model!r}",
            field="$.gpu.model",
            found=model,
            next="give count, memory and share as arguments of their own; separate alternative models by |",
        )
    asked = f"{memory}M" if isinstance(memory, int) else memory
    _, spec = gpu_spec(f"{count}x{model}{asked and ':'}{asked}{share and '@'}{share}")
    try:
        return msgspec.structs.replace(
            spec, scheduling=scheduling, distinct_hosts=distinct_hosts, vendor=vendor,
            min_compute_capability=compute_capability, prefer=prefer, topology=topology,
        )  # fmt: skip
    except ValueError as error:
        raise rejected("invalid-argument", str(error), field="$.gpu", found=compute_capability) from None


def gpu_spec(gpu: GpuSpec | str | int) -> tuple[int, GpuSpec]:
    """Return (replicas, spec) of a token, a count or a spec. Raises `Rejected`."""
    if isinstance(gpu, GpuSpec):
        return 1, gpu
    try:
        return _parsed(str(gpu))
    except ValueError as error:
        raise rejected(
            "invalid-argument",
            str(error),
            field="$.gpu",
            found=str(gpu),
            allowed="a count, a model or both",
            next="for example 1xH100, 2xH100:80G, 3x2xA100 or 1xL40S@mps=50%; with a count any model may be named, as"
            " 1xTITAN",
        ) from None
