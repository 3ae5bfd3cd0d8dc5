"""What an operator does with a fleet: look after workers, tenants, the ledger, users."""
