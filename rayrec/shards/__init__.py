"""The rows and optimizer state of one shard."""
