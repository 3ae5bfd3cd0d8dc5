"""What a screen over a whole fleet shows, made from the public frames and from the leader's answers; without I/O."""
