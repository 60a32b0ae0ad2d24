"""Logits of a trained model for a sample of rows, with the rows of its tables given."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rayrec.errors import ConfigError, RayrecError
from rayrec.serve.parity import Sample
from rayrec.serve.sampled import KeptRows, ids_of, sampled
from rayrec.serve.source import TrainedModel, configs_of
from rayrec.storage import one_line


@torch.inference_mode()
def scored(
    source: TrainedModel, kept: Mapping[str, KeptRows], sample: Sample
) -> tuple[Tensor, ...]:
    """Return the logits of the trained model, with the kept rows in its tables."""
    places = {
        name: sampled(one, {table.name: kept[table.name] for table in configs_of(one)})
        for name, one in source.collections.items()
    }
    batch = sample.batch
    outputs: tuple[Tensor, ...] = source.scorer(places)(batch.dense_features, batch.sparse_features)
    return outputs


def check_takes(source: TrainedModel, sample: Sample) -> None:
    """Check that a model without a schema takes the made-up rows, which have no dense columns.

    Raises:
        ConfigError: the model refuses them.
    """
    ids = ids_of(source.tables(), sample.batch.sparse_features)
    zeros = {
        table.name: KeptRows(
            ids[table.name], torch.zeros(len(ids[table.name]), table.embedding_dim)
        )
        for table in source.tables()
    }
    try:
        scored(source, zeros, sample)
    except RayrecError:
        raise
    # a user's model may raise any type of error for a wrong number of columns
    except Exception as error:
        raise ConfigError(
            f"the checkpoint has no schema, and {type(source.module).__name__} does not take rows "
            f"of ids alone ({type(error).__name__}: {one_line(error)}). Give schema=, by which it "
            "was trained, or data= with rows of it."
        ) from error
