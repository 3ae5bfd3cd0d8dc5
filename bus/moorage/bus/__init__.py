"""NATS as moorage uses it: one connection, its inboxes, raw JetStream, the embedded server, contexts."""
