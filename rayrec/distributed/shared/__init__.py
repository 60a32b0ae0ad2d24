"""Tables in memory that all ranks of a host map."""
