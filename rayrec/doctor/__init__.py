"""The table doctor: what the rows of a checkpoint or an artifact tell, and what to do about it."""

from rayrec.doctor.examine import examine
from rayrec.doctor.table_health import DoctorReport, Finding, TableHealth

__all__ = ["DoctorReport", "Finding", "TableHealth", "examine"]
