"""Erasure: the rows of some ids taken out of every file of a run."""
