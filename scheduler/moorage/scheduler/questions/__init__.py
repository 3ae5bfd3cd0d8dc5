"""Questions of clients, answered from the leader's state or from a fork of it."""
