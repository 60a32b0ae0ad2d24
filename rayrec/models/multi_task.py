"""Several tasks on one model: a loss per task, summed by their weights.

# B rows of the batch, K logits of all tasks together
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError, InputError
from rayrec.models.dlrm_parts import ClickBatch, logits_of_batch
from rayrec.spec.task import Task

Named = Mapping[str, Tensor]


class MultiTaskTrain(nn.Module):
    """A model of several tasks and its loss: batch -> (loss, (loss, logits, labels)).

    `logits` and `labels` are mappings from the names of the tasks to (B,), or (B, classes) logits.
    The loss is the sum over tasks of the weight times the mean over the rows of binary cross
    entropy, cross entropy or half the squared error. Where the batch has weights of rows, each
    row's loss is multiplied by its own before the mean over the rows. Of no rows the loss is 0.

    Args:
        model: (dense (B, I), ids) -> (B, K), the outputs of the tasks side by side; such as a DLRM
            whose last layer has K units. Or a model with a `forward_batch`, see `logits_of_batch`.
        tasks: tasks in the order of the columns of `batch.labels` and of the model's outputs.
    Raises:
        ConfigError: there is no task.
    """

    def __init__(self, model: nn.Module, tasks: Sequence[Task]) -> None:
        super().__init__()
        if not tasks:
            raise ConfigError("MultiTaskTrain(tasks=()): give it the tasks of the run.")
        self.model, self.tasks = model, tuple(tasks)

    def forward(self, batch: ClickBatch) -> tuple[Tensor, tuple[Tensor, Named, Named]]:
        """B rows -> scalar loss; loss, logits by task, labels by task.

        Raises:
            ConfigError: the model's outputs or the batch's labels are not those of the tasks.
            InputError: a label is no class of its task.
        """
        outputs_BK = logits_of_batch(self.model, batch)
        labels = batch.labels if batch.labels.dim() == 2 else batch.labels.unsqueeze(1)
        sizes = [task.outputs for task in self.tasks]
        if outputs_BK.dim() != 2 or outputs_BK.shape[1] != sum(sizes):
            raise ConfigError(
                f"the model gives {tuple(outputs_BK.shape)}; the tasks need {sum(sizes)} outputs "
                f"a row: {', '.join(f'{t.name} {t.outputs}' for t in self.tasks)}."
            )
        if labels.shape[1] != len(self.tasks):
            raise ConfigError(
                f"the batch has {labels.shape[1]} labels a row, the run has {len(self.tasks)} "
                "tasks; the schema's label must name one column per task, in their order."
            )
        weights = getattr(batch, "weights", None)
        # the sum of no rows is 0, and stays in the graph
        total = outputs_BK.sum() if not labels.numel() else outputs_BK.new_zeros(())
        logits, wanted = {}, {}
        for task, own, label in zip(
            self.tasks, outputs_BK.split(sizes, dim=1), labels.unbind(1), strict=True
        ):
            logits[task.name] = own if task.classes is not None else own.squeeze(1)
            wanted[task.name] = label
            if label.numel():
                losses = row_losses(task, logits[task.name], label)
                weighted = losses if weights is None else losses * weights
                total = total + task.weight * weighted.mean()
        detached = {name: tensor.detach() for name, tensor in logits.items()}
        return total, (total.detach(), detached, wanted)


def row_losses(task: Task, logits: Tensor, labels: Tensor) -> Tensor:
    """(B,) loss of every row.

    Raises:
        InputError: a label is no class of the task; found on CPU, where looking costs nothing.
    """
    if task.kind == "binary":
        wanted = labels.to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    if task.kind == "regression":
        return 0.5 * (logits - labels.to(logits.dtype)).square()
    classes = labels.long()
    if labels.device.type == "cpu":
        bad = (classes != labels) | (classes < 0) | (classes >= (task.classes or 0))
        if bad.any():
            row = int(bad.nonzero()[0])
            raise InputError(
                f"row {row} of the batch has label {float(labels[row]):g} of the task "
                f"{task.name!r}, which has the classes 0 to {(task.classes or 0) - 1}."
            )
    return functional.cross_entropy(logits, classes, reduction="none")
