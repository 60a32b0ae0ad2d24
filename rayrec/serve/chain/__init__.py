"""The chain of publications: a base, which is an artifact, and deltas, which are the rows and the
dense part that training has changed since the publication before.
"""
