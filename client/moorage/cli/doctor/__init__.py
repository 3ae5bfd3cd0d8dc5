"""Is everything there that moorage needs?"""
