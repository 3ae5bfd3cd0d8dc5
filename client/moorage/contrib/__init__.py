"""Bridges from other frameworks; each needs that framework, and nothing else imports them."""
