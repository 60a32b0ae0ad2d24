"""`ProfileConfig`: the steps of a run to profile, and the folder of the profile."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.checks import absolute_path, is_uri, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Folder of a profile, and the steps to profile.

    Attributes:
        path: folder of every rank's own host; traces of the ranks and rank 0's summary go there,
            over those of an earlier run. A relative path is taken from the working directory of the
            process that makes this config.
        skip_steps: steps of this run to skip first, since the first ones are slow.
        steps: number of steps that are timed by part, and then of those that are traced.
    """

    path: str
    skip_steps: int = 5
    steps: int = 10

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.path or is_uri(self.path):
            raise ConfigError(
                f"ProfileConfig has path={self.path!r}; it must be a folder of the "
                "ranks' own file system."
            )
        object.__setattr__(self, "path", absolute_path("ProfileConfig has path", self.path))
        for what, value in (("skip_steps", self.skip_steps), ("steps", self.steps)):
            whole_number(f"ProfileConfig has {what}", value)

    def check_steps(self, steps: int) -> None:
        """Check that a run of `steps` steps is long enough for the profile.

        Raises:
            ConfigError: the run is too short.
        """
        if steps < self.skip_steps + 2 * self.steps:
            raise ConfigError(
                f"the run has {steps} steps, a profile takes {self.skip_steps + 2 * self.steps}: "
                f"it skips {self.skip_steps}, times "
                f"{self.steps} and traces {self.steps}. Run longer, or set "
                "ProfileConfig(skip_steps=..., steps=...)."
            )
