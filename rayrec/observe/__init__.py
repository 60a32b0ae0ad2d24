"""Time of training steps by part, measured and predicted."""
