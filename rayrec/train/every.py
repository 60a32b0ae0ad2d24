"""`Every`: after how many steps, rows or seconds, of a clock or of events, a run acts again."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.checks import seconds, whole_number
from rayrec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Every:
    """After every n steps, n rows, or s seconds, also of event time; never, where none is given.

    Attributes:
        n_steps: global steps from one time to the next.
        s: seconds from one time to the next, which comes at the end of a window.
        n_rows: rows over all ranks, at the end of the step that trains on the last of them.
        event_s: whole seconds of event time, at the end of the window of a stream which passes a
            multiple of them.
    """

    n_steps: int | None = None
    s: float | None = None
    n_rows: int | None = None
    event_s: int | None = None

    def check(self, owner: str, needed: bool = False) -> None:
        """Check the fields of a config: `every_n_steps`, `every_s` and perhaps others.

        Args:
            owner: the name of the config.
            needed: one of them must be given.
        Raises:
            ConfigError: two are given, or none where one is needed, or one is out of range.
        """
        said: dict[str, float | None] = {"every_n_steps": self.n_steps, "every_n_rows": self.n_rows}
        said |= {"every_event_s": self.event_s, "every_s": self.s}
        given = [f"{name}={value}" for name, value in said.items() if value is not None]
        if len(given) > 1 or (needed and not given):
            given = given or [f"{name}=None" for name in ("every_n_steps", "every_s")]
            raise ConfigError(
                f"{owner} has {' and '.join(given)}; "
                f"give {'exactly one of them' if needed else 'one'}."
            )
        for name in ("every_n_steps", "every_n_rows", "every_event_s"):
            if said[name] is not None:
                whole_number(f"{owner} has {name}", said[name])
        if self.s is not None:
            seconds(f"{owner} has every_s", self.s)

    def next_step(self, step: int, rows: int = 0, batch: int = 1) -> int | None:
        """Return the first step after `step` at which it may be due; None where seconds decide,
        or where the windows of a stream end a loop's windows anyway.

        Args:
            rows: rows trained on so far.
            batch: most rows of a step; fewer of a last step of an epoch put it off.
        """
        if self.n_rows is not None:
            return step + -(-(self.n_rows - rows % self.n_rows) // batch)
        return None if self.n_steps is None else (step // self.n_steps + 1) * self.n_steps

    def due(
        self,
        step: int,
        passed_s: float = 0.0,
        rows: int = 0,
        added: int = 0,
        newest: tuple[int, int] | None = None,
    ) -> bool:
        """Return True if it is due at the end of a window.

        Args:
            step: global steps done.
            passed_s: seconds since the last time.
            rows: rows trained on so far.
            added: those of the window.
            newest: the newest event time before the window and behind it, see `LiveRun`.
        """
        if self.event_s is not None:
            return newest is not None and newest[1] // self.event_s > newest[0] // self.event_s
        if self.n_rows is not None:
            return rows // self.n_rows > (rows - added) // self.n_rows
        if self.n_steps is not None:
            return step % self.n_steps == 0
        return self.s is not None and passed_s >= self.s
