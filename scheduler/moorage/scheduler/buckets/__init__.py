"""What a scheduler passes on between workers and the buckets of tenants, in a process of its own."""
