"""Rows of dynamic tables: which ids have one, and who gives it back."""
