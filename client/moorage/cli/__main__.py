"""`python -m moorage.cli`: the `moorage` command."""

from __future__ import annotations

from moorage.cli.start import main

if __name__ == "__main__":
    main()
