"""Report of a job at its end, re-exported from `rayrec.runs.report`."""

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
