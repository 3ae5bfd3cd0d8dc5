"""What is told from the ledger beside the leader: a process that folds each record, and counts what it says."""
