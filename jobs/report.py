"""Report of a job at its end, re-exported from `rayrec.runs.reporting`."""

from rayrec.runs.reporting import (
    Reporting,
    ResultReport,
    fit_and_report,
    process_start,
    seconds_by_part,
    timing_table,
)

__all__ = [
    "Reporting",
    "ResultReport",
    "fit_and_report",
    "process_start",
    "seconds_by_part",
    "timing_table",
]
