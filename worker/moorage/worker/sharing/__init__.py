"""What keeps a job to its part of a shared GPU, and measures it."""
