"""The rows of one rank: memory, look-up and update."""
