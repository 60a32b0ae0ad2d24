"""`CheckpointConfig`: the schedule, kind and retention of a run's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.checks import whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.train.every import Every

# default number of checkpoints from one with all rows to the next, in a run with increments
FULL_EVERY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Schedule, kind and retention of checkpoints; named as in Ray Train where it has them.

    Attributes:
        every_n_steps: save after every so many global steps.
        every_n_rows: save after the step that trains on the last of every so many rows, counted
            over all ranks since the run was begun or resumed.
        every_event_s: save at the end of a window of a stream, the first whose events pass a
            multiple of so many seconds of event time.
        every_s: save when so many seconds have gone by since the last time, at the end of a window.
            None of these saves none on the way.
        num_to_keep: keep only so many newest checkpoints, and all that they add to; None keeps all.
        at_end: save when the run ends, also when it was stopped; needs a storage_path.
        asynchronous: training pauses only for a copy in host memory, and a thread of every rank
            writes it.
        incremental: save only the rows of tables that were touched since the last checkpoint.
        full_every: every so many-th checkpoint holds all rows; 10 where it is None.
    Raises:
        ConfigError: the options contradict each other.
    """

    every_n_steps: int | None = None
    every_n_rows: int | None = None
    every_event_s: int | None = None
    every_s: float | None = None
    num_to_keep: int | None = None
    at_end: bool = True
    asynchronous: bool = False
    incremental: bool = False
    full_every: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self.every.check("CheckpointConfig")
        if self.num_to_keep is not None:
            whole_number("CheckpointConfig has num_to_keep", self.num_to_keep)
        if self.full_every is not None:
            whole_number("CheckpointConfig has full_every", self.full_every, 2)
            if not self.incremental:
                raise ConfigError(
                    f"CheckpointConfig has full_every={self.full_every} without incremental=True: "
                    "every checkpoint is full then. Leave full_every out, or add incremental=True."
                )

    @property
    def every(self) -> Every:
        """How often a run saves on the way."""
        return Every(self.every_n_steps, self.every_s, self.every_n_rows, self.every_event_s)
