"""What a plan, a run and every rank agree on: the tables' optimizers, and how rows travel.

Importing it needs the standard library alone, so plans are made without torch; formulas import
torch when they are called.
"""
