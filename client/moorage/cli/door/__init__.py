"""`moorage door`: services for clients of HTTP."""
