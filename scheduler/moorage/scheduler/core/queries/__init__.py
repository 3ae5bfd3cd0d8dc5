"""What is answered from the state as it is: how things stand, why a job waits, what would help."""
