"""`moorage page`: a small web server that draws the fleet for browsers."""
