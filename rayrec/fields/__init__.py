"""Types of options: the values that a field takes by its annotation, in Python and in run files."""
