"""`moorage doctor`: checks whether everything is there that moorage needs."""
