"""Stories of ended jobs: written to a stream, and read from it."""
