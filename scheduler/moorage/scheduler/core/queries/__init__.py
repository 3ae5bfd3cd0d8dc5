"""Answers to questions from the current state: how things stand, why a job waits, what would help."""
