"""`moorage top`: the whole fleet on one screen, once as text or live."""
