"""The scheduler: a pure decision core, and the shell that talks NATS."""
