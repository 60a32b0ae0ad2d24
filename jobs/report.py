"""What a job prints and writes at its end; its home is `rayrec.runs.reporting`."""

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
