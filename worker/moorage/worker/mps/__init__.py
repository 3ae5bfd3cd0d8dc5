"""MPS daemons that a worker runs by itself, one for each GPU that jobs share by mps: see `managed`."""
