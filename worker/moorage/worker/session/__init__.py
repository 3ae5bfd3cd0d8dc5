"""What a worker's session decides: attempts, the lease, reports. No I/O; time is an argument."""
