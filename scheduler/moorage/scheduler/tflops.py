"""Turns `share.tflops` of a request into a percentage, before the engine sees the request.

The ledger, the fleet and the workers know only percentages: a request in the ledger must not depend on a setting. So a
request with TFLOPS must name one model, and that model must be in the table of capacities.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.codec import decode_request, encode, is_json
from moorage.schemas.errors import Refused, refuse
from moorage.schemas.gpu import bare_model, model_matches
from moorage.schemas.job import Request
from moorage.schemas.tflops import parse_tflops, percent_of

#: TFLOPS at half precision (FP16 on tensor cores, without sparsity) by the name that NVML gives a GPU, after NVIDIA's
#: data sheets
CAPACITIES: Final[Mapping[str, float]] = {
    "Tesla T4": 65,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla V100-PCIE-32GB": 112,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
    "NVIDIA A10": 125,
    "NVIDIA A30": 165,
    "NVIDIA A40": 149.7,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
}
#: of a file of capacities
FILE_BYTES_MAX: Final = 64 * 1024
MODELS_MAX: Final = 1_000
FILES_KNOWN: Final = 4  # a scheduler has one
MODEL_CHARS_MAX: Final = 128
TFLOPS_MAX: Final = 1e6
_FIELD: Final = "$.gpu.share.tflops"
_WORD: Final = b"tflops"


@functools.lru_cache(FILES_KNOWN)
def read_capacities(tflops_file: str) -> Mapping[str, float]:
    """Return the TFLOPS of GPU models from the table `[tflops]` of a file; "" stands for the built-in table.

    A file is read once in a process, at its first use. Raises Refused with bad-settings if it cannot be read or is not
    valid; then the next use reads it again.
    """
    if not tflops_file:
        return CAPACITIES
    path = Path(tflops_file)
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise _bad(path, f"is larger than {FILE_BYTES_MAX} bytes")
        said = tomllib.loads(raw.decode("utf-8-sig"))
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise _bad(path, f"is not valid TOML: {error}") from None
    rows = said.pop("tflops", None)
    if said or not isinstance(rows, dict) or not 1 <= len(rows) <= MODELS_MAX:
        raise _bad(path, f"must have one table, [tflops], of 1..{MODELS_MAX} models")
    for model, tflops in rows.items():
        is_number = isinstance(tflops, int | float) and not isinstance(tflops, bool) and math.isfinite(tflops)
        if not is_number or not 0 < tflops <= TFLOPS_MAX or not 1 <= len(model) <= MODEL_CHARS_MAX:
            raise _bad(path, f"must give {model[:80]!r} a number of TFLOPS above 0, at most {TFLOPS_MAX:g}")
    return rows


def resolved(body: bytes, tflops_file: str = "") -> bytes:
    """Return a request's body with the percentage in place of TFLOPS; the same bytes if it has none.

    A body without the word `tflops` is not even decoded. Raises Refused if the TFLOPS cannot be converted, as
    `decode_request` does, and as `read_capacities` does.
    """
    if _WORD not in body:
        return body
    request = decode_request(body)
    gpu = request.gpu
    share = None if gpu is None else gpu.share
    if gpu is None or share is None or share.tflops is None:
        return body
    percent = _percent(share.tflops, request, read_capacities(tflops_file))
    plain = msgspec.structs.replace(share, tflops=None, compute_percent=percent)
    return encode(msgspec.structs.replace(request, gpu=msgspec.structs.replace(gpu, share=plain)), json=is_json(body))


def _percent(text: str, request: Request, capacities: Mapping[str, float]) -> int:
    """Return the percentage, at least 1: a share cannot be empty."""
    gpu = request.gpu
    models = () if gpu is None else gpu.models
    if len(models) != 1:
        named = "several" if models else "none"
        raise _refused(f"tflops need one model, and the request names {named}", ", ".join(models) or "no model")
    in_full = bare_model(models[0]).lower()
    names = [name for name in capacities if name.lower() == in_full]
    names = names or sorted(name for name in capacities if model_matches(models[0], name))
    if not names:
        raise _refused(f"how many TFLOPS {models[0]} has is not known", models[0], known=capacities)
    if len({capacities[name] for name in names}) > 1:
        told = ", ".join(f"{name} {capacities[name]:g}" for name in names[:8])
        raise _refused(f"{models[0]} may be GPUs of different TFLOPS: name one of them", told)
    return max(1, percent_of(parse_tflops(text), names[0], capacities))


def _refused(message: str, found: str, known: Mapping[str, float] | None = None) -> Refused:
    return refuse(
        "invalid-argument",
        message,
        field=_FIELD,
        found=found,
        allowed="" if known is None else ", ".join(sorted(known)[:20]),
        next="name the model in full in gpu.model (=MODEL takes whole words), or ask for compute_percent",
    )


def _bad(path: Path, why: str) -> Refused:
    return refuse(
        "bad-settings",
        f"the file {path} {why}",
        field="$.tflops_file",
        found=str(path),
        next='name a TOML file with a table [tflops] of lines as "NVIDIA H100 PCIe" = 756.5, or leave tflops_file out',
    )
