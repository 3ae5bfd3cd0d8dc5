"""The ledger's streams: appends, reading, snapshots, backups, recordings."""
