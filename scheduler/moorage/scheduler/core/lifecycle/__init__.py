"""What becomes of jobs and workers, from a request or a join to the end."""
