"""Parity: the distance of an artifact's scores from those of the model that it was made of.

The same rows are scored by the float32 model and by the artifact as a server will load it. Where
the distance is above a bound, tables are packed one at a time, which shows whose rounding it is.

    # B rows of the sample
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rayrec.checks import positive
from rayrec.errors import ArtifactError
from rayrec.fields.typed import check_fields
from rayrec.metrics import BinaryMetrics
from rayrec.serve.sample import ParitySample


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityBounds:
    """Largest distances from the trained model that an export accepts.

    Attributes:
        logit: bound on the error of any logit of the sample.
        auc, ne: bounds on the errors of AUC and normalized entropy; measured where the rows have
            labels of both kinds.
    """

    logit: float = 0.5
    auc: float = 0.003
    ne: float = 0.003

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("logit", "auc", "ne"):
            positive(f"the bound {name}", getattr(self, name))


def compared(
    sample: ParitySample,
    kinds: Sequence[tuple[str, str]],
    wanted: Sequence[Tensor],
    got: Sequence[Tensor],
) -> dict[str, Any]:
    """Return the distances of the outputs of two models on one sample, as JSON data.

    Args:
        kinds: name and kind of every output.
        wanted, got: logits of the trained model and of the artifact.
    """
    errors = [(a.double() - b.double()).abs() for a, b in zip(wanted, got, strict=True)]
    # NaN on either side must not pass for a small error
    largest = max((float(e.nan_to_num(math.inf).max()) for e in errors if e.numel()), default=0.0)
    values = torch.cat([error.flatten() for error in errors])
    mean = float(values.mean()) if values.numel() else 0.0
    told: dict[str, Any] = {"rows": sample.batch.rows, "rows_of": sample.source}
    told |= {"max_logit_error": largest, "mean_logit_error": mean}
    for number, (_, kind) in enumerate(kinds):
        if sample.has_labels and kind == "binary":
            own = sample.batch.labels
            labels = own if own.dim() == 1 else own[:, number]
            return told | _click_scores(labels, wanted[number], got[number])
    return told


def _click_scores(labels: Tensor, wanted: Tensor, got: Tensor) -> dict[str, float]:
    scores = []
    for logits in (wanted, got):
        metrics = BinaryMetrics()
        metrics.update(logits, labels)
        scores.append(metrics.compute())
    exact, packed = scores
    # both are undefined for labels of one kind
    if math.isnan(exact.auc) or math.isnan(packed.auc):
        return {}
    return {
        "auc": packed.auc,
        "auc_difference": packed.auc - exact.auc,
        "ne": packed.ne,
        "ne_difference": packed.ne - exact.ne,
    }


def check_bounds(
    told: Mapping[str, Any], bounds: ParityBounds, of_tables: Callable[[], Mapping[str, float]]
) -> dict[str, Any]:
    """Refuse an artifact that is too far from its model.

    Args:
        told: distances that `compared` returned.
        of_tables: table -> largest error of a logit when it alone is packed; called when needed.
    Returns:
        `told` with the bounds added.
    Raises:
        ArtifactError: names the distance, its bound, and the tables that cause it.
    """
    distances = {
        "logit": told["max_logit_error"],
        "auc": abs(told.get("auc_difference", 0.0)),
        "ne": abs(told.get("ne_difference", 0.0)),
    }
    for name, distance in distances.items():
        bound = getattr(bounds, name)
        if distance <= bound:
            continue
        errors = sorted(of_tables().items(), key=lambda pair: -pair[1])[:3]
        causes = ", ".join(f"{table!r} ({error:.3g})" for table, error in errors)
        raise ArtifactError(
            f"the packed model is off by {distance:.3g} in {name} on {told['rows']} of "
            f"{told['rows_of']}, and at most {bound:g} is allowed. Of all tables these alone move "
            f"the logits most: {causes}. Store them as fp16, or raise the bound."
        )
    return {**told, "bounds": asdict(bounds)}
