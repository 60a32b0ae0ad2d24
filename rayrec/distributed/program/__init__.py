"""What follows from a plan, worked out once: who looks up what, and where every column goes."""
