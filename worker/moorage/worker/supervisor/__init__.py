"""The supervisor, which is the worker's second process and owns the jobs' processes, and the agent's link to it."""
