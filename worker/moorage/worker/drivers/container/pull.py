"""Compute the progress of a pull from the engine's messages about the image's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: most layers of one image that are counted; engines allow 127
LAYERS_MAX: Final = 256
_MIB: Final = 1 << 20


class PullProgress:
    """Collects the engine's messages about one pull; `text` describes the progress in a line."""

    def __init__(self, image: str) -> None:
        self._head = f"pulling the image {image}"
        self._layers: dict[str, tuple[int, int]] = {}
        self._shown = 0
        self._said = ""

    def add(self, message: Mapping[str, Any]) -> None:
        """Take one message of the engine; those without a layer's bytes are ignored."""
        if isinstance(text := message.get("stream"), str):  # podman's: lines without numbers
            self._said = text.strip() or self._said
        layer, status = str(message.get("id", "")), message.get("status")
        detail = message.get("progressDetail")
        if status == "Downloading" and isinstance(detail, dict):
            here, size = detail.get("current"), detail.get("total")
            is_new = layer not in self._layers
            if isinstance(here, int) and isinstance(size, int) and (len(self._layers) < LAYERS_MAX or not is_new):
                self._layers[layer] = min(here, size), size
        elif status in ("Download complete", "Pull complete") and layer in self._layers:
            size = self._layers[layer][1]
            self._layers[layer] = size, size

    @property
    def text(self) -> str:
        """The progress in a line.

        A layer's size comes when its pull begins, so the largest percentage so far is shown.
        """
        size = sum(size for _, size in self._layers.values())
        if size <= 0:
            return ": ".join(filter(None, (self._head, self._said)))
        part = 100 * sum(here for here, _ in self._layers.values()) // size
        self._shown = max(self._shown, part)
        return f"{self._head}: {self._shown} % of {max(1, size // _MIB)} MiB"
