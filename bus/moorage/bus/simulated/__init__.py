"""The twin of NATS, its network, its clock and its processes, in this process and in virtual time."""
