"""The ways in which a worker can run a job; each is one file that implements `base.Driver`."""
