"""`python -m moorage.scheduler`: one scheduler process, as `moorage scheduler` starts it."""

from __future__ import annotations

from moorage.scheduler.main import main

if __name__ == "__main__":
    main()
