"""NATS as moorage uses it: one connection, its inboxes and outbox, raw JetStream, the embedded server, contexts."""
