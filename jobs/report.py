"""What a job prints and writes at its end; its home is `rayrec.runs.report`."""

from rayrec.runs.report import (
    Reporting,
    Told,
    fit_and_report,
    process_start,
    seconds_by_part,
    timing_table,
)

__all__ = [
    "Reporting",
    "Told",
    "fit_and_report",
    "process_start",
    "seconds_by_part",
    "timing_table",
]
