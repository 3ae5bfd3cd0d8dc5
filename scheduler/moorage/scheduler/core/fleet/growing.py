"""The shapes of hosts of which more can come: what such a host could run waits for it, and is a demand."""

from __future__ import annotations

from collections.abc import Iterable

from moorage.scheduler.core.fleet.shape import Shape
from moorage.schemas.gpu import model_matches, parse_token


class Growing:
    """Reads the setting `growing`: shapes of whole hosts, as `8xH100`. Raises ValueError, naming the one that is
    wrong."""

    def __init__(self, shapes: Iterable[str]) -> None:
        self._shapes = [_host(text) for text in shapes]

    def __bool__(self) -> bool:
        return bool(self._shapes)

    def fits(self, shape: Shape) -> bool:
        """Return whether one replica of this shape has room on a new host, as far as the number and model of its GPUs
        tell. What names a device or a worker's slot waits for no new host."""
        if shape.device_ids:
            return False
        return any(
            shape.count <= gpus and (not shape.count or not shape.models or _matches(shape.models, model))
            for gpus, model in self._shapes
        )


def _matches(patterns: Iterable[str], model: str) -> bool:
    return any(model_matches(pattern, model) for pattern in patterns)


def _host(text: str) -> tuple[int, str]:
    try:
        replicas, spec = parse_token(text)
    except ValueError as error:
        raise ValueError(f"growing has shapes of hosts, as 8xH100: {error}") from None
    models = [spec.model] if isinstance(spec.model, str) else list(spec.model or ())
    if replicas != 1 or len(models) != 1:
        raise ValueError(f"growing has shapes of hosts, a number of GPUs and their model, as 8xH100: found {text!r}")
    return spec.count, models[0].lstrip("=~")
