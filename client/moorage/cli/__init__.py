"""The `moorage` command: a thin reader of arguments and writer of tables over the SDK."""
