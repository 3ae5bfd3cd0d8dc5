"""The queue: groups of waiting jobs, and their order."""
