"""The process around a session: NATS, the journal, the drivers' events, the settings' rules."""
