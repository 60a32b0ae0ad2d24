"""`WorldMark`: the number of a world of ranks, by which they see that another one followed it.

A node that is cut off from the cluster's head may have all ranks of a world, which train on beside
the world that the driver began in their place. What both save has the same names. So the driver
writes the number of each world into one file of the run's folder before it begins, and saves and
publications are refused where that of a later one stands. Each costs two reads of a small file.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.errors import SaveError
from rayrec.storage import resolve


@dataclass(frozen=True, slots=True)
class WorldMark:
    """The mark of one world of ranks.

    Attributes:
        path: file or URI with the number of the newest world; none is there once the driver that
            wrote it has given the run's folder back, or lost it.
        number: number of this world.
    """

    path: str
    number: int

    def check(self) -> None:
        """Check that no other world has followed.

        Raises:
            SaveError: one has.
        """
        filesystem, path = resolve(self.path)
        try:
            with filesystem.open_input_stream(path) as file:
                newest = int(file.read())
        except FileNotFoundError:
            raise SaveError(
                f"{self.path} is gone: the run has ended, or another driver goes on with it. Look "
                "at the checkpoints there before you begin it again."
            ) from None
        if newest > self.number:
            raise SaveError(
                f"world {newest} of the run has followed world {self.number}, which these ranks "
                "form; its checkpoints count, and not theirs. End their processes."
            )
