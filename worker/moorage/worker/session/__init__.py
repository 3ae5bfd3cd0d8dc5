"""What a worker's session decides: members, the lease, reports. No I/O; time is an argument."""
