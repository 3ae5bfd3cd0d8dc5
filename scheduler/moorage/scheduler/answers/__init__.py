"""Answers to questions from the folded state and from histories: how things stand, why a job waits, what would help."""
