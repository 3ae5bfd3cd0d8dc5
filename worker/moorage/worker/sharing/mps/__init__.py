"""Run the worker's own MPS daemons, one for each GPU that jobs share by mps: see `managed`."""
