"""The types of options: what a field takes, by its annotation alone, in Python and in run files."""
