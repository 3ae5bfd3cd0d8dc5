"""The version, said once: the package's metadata and every frame take it from here. Imports nothing, to be quick."""

from typing import Final

RELEASE: Final = "0.2.0"
