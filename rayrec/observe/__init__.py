"""Where the time of steps goes, measured and predicted."""
