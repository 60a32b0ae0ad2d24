"""Options on which a plan, a run and every rank agree: sparse optimizers, and the wire of rows.

Importing it needs the standard library alone, so plans are made without torch; formulas import
torch when they are called.
"""
