"""What operators do, to jobs, tenants and workers."""
