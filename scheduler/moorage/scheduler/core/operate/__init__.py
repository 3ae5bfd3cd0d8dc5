"""Operators' orders on jobs, tenants and workers."""
