"""The cores and the memory that a process takes."""
