"""The `rayrec` command: work around a model that needs no cluster. Subcommands import what they
need when they run.
"""
