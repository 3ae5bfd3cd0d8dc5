"""What is sent over NATS: requests, frames, subjects, states and errors. It imports msgspec and nothing of moorage."""
