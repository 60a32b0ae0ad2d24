"""`Every`: after how many steps, or how many seconds, a run does something again."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.checks import seconds, whole_number
from rayrec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Every:
    """After every n steps or every s seconds; never, where neither is given.

    Attributes:
        n_steps: global steps from one time to the next.
        s: seconds of training from one time to the next, which comes at the end of a window.
    """

    n_steps: int | None = None
    s: float | None = None

    def check(self, owner: str, needed: bool = False) -> None:
        """Check the fields `every_n_steps` and `every_s` of a config.

        Args:
            owner: the name of the config.
            needed: one of both must be given.
        Raises:
            ConfigError: both are given, or neither where one is needed, or one is out of range.
        """
        both = self.n_steps is not None and self.s is not None
        if both or (needed and self == Every()):
            raise ConfigError(
                f"{owner} has every_n_steps={self.n_steps} and every_s={self.s}; "
                f"give {'exactly one of them' if needed else 'one'}."
            )
        if self.n_steps is not None:
            whole_number(f"{owner} has every_n_steps", self.n_steps)
        if self.s is not None:
            seconds(f"{owner} has every_s", self.s)

    def next_step(self, step: int) -> int | None:
        """Return the first step after `step` at which it is due; None where seconds decide."""
        return None if self.n_steps is None else (step // self.n_steps + 1) * self.n_steps

    def due(self, step: int, passed_s: float = 0.0) -> bool:
        """Return True if it is due at the end of a window.

        Args:
            step: global steps done.
            passed_s: seconds of training since the last time.
        """
        if self.n_steps is not None:
            return step % self.n_steps == 0
        return self.s is not None and passed_s >= self.s
