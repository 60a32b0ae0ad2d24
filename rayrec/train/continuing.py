"""Choice of the checkpoint that a run resumes, and removal of checkpoints of later steps.

A damaged checkpoint is found while its rows are read, so every rank tries the same checkpoints in
the same order and they agree, after each, whether it was whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayrec.checkpoint import CheckpointManager
from rayrec.errors import DamagedCheckpointError
from rayrec.train.window import gather_objects


def first_whole(
    restore: Callable[[str], int], paths: Sequence[str], note: Callable[[str], None]
) -> tuple[str, int]:
    """Restore the first checkpoint that no rank finds damaged. All ranks call it together.

    Args:
        restore: fills the model from a checkpoint; returns its step.
        paths: paths of checkpoints, the wanted one first.
        note: receives a line for each checkpoint that was passed over.
    Returns:
        the path and its step.
    Raises:
        DamagedCheckpointError: all are damaged.
    """
    for path in paths:
        step, damage = 0, ""
        try:
            step = restore(path)
        except DamagedCheckpointError as error:
            damage = str(error)
        # all ranks pass over what one of them finds damaged
        first = next((told for told in gather_objects(damage) if told), "")
        if not first:
            return path, step
        if path == paths[-1]:
            raise DamagedCheckpointError(first)
        note(f"passed over {path}, which is damaged: {first}")
    raise AssertionError("paths is not empty")


def set_later_aside(run_path: str, path: str, step: int, note: Callable[[str], None]) -> None:
    """Move later steps of the run's folder away, since the run writes those steps anew."""
    manager = CheckpointManager(run_path)
    if manager.step_of(path) is None:
        return
    folder = manager.set_aside(step)
    if folder is not None:
        note(f"checkpoints after step {step} were set aside in {folder}")
