"""Runs of click models from files, data and checkpoints, for the command line and the jobs.

`rayrec.cli` and `jobs` say what a user wants; the modules here open the data, build the `Driver`,
run it and report. Run files (`run_file`) are read and written here, too.
"""
