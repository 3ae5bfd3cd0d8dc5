"""The durable queue: requests that wait in a stream, and those that were refused."""
