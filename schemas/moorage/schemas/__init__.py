"""The contract on the wire: requests, frames, subjects, states and errors. Imports msgspec and nothing of ours."""
