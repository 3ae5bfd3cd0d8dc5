"""A simulated NATS with its network, clock and processes, within this process and in virtual time."""
