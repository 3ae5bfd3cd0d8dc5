"""Run `python -m moorage.worker.supervisor`: see `main`."""

import sys

from moorage.worker.supervisor.main import main

sys.exit(main())
