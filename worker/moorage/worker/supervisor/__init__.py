"""The worker's second process, which owns the jobs' processes, and the agent's side of talking to it."""
