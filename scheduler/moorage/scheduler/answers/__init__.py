"""Answers to questions from the folded state and from stories: how things stand, why a job waits, what would help."""
