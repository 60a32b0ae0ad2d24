"""The chain of publications: a base, which is an artifact, and deltas, which are the rows and the
dense part that training has changed since the publication before.

publication    what a publication says of itself, and its place in the chain
version_policy whether a publication comes next: the state machine, without files
row_files      the packed rows of a delta
row_ranges     the power by which all rows of a table are packed, from the rows that change
column_gather  whole rows from the ranks that share them by columns
writer         what every rank writes of a publication
folder         the folder of a chain
copies         the tables of a follower, in memory that forked processes share
follower       reads the folder and goes from version to version
following      the predictor of the newest version
"""
