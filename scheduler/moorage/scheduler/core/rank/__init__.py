"""Rankers: which host, of those that fit now."""
