"""How often something is tried, told and answered, for the ledger, the readers of streams and the leader alike."""
