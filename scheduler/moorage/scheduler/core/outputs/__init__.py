"""What leaves once a record is acknowledged."""
