"""The protocol's version. Every frame has it in `v`, which is looked at before anything else."""

from __future__ import annotations

from typing import Final

VERSION: Final = 1
