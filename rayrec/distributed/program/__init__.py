"""The program of a step, compiled once from a plan: slots of every rank, and places of columns."""
