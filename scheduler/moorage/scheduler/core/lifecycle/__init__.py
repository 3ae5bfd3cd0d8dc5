"""The life of jobs and workers, from a request or a join to the end."""
