"""Logits of a trained model for a sample of rows, with the rows of its tables given."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rayrec.errors import ConfigError, RayrecError
from rayrec.serve.parity import ParitySample
from rayrec.serve.sampled import SampledRows, ids_of, sampled
from rayrec.serve.trained_model import TrainedModel, configs_of
from rayrec.storage import one_line


@torch.inference_mode()
def sample_scores(
    trained: TrainedModel, kept: Mapping[str, SampledRows], sample: ParitySample
) -> tuple[Tensor, ...]:
    """Return the logits of the trained model, with the kept rows in its tables."""
    places = {
        name: sampled(one, {table.name: kept[table.name] for table in configs_of(one)})
        for name, one in trained.collections.items()
    }
    batch = sample.batch
    outputs: tuple[Tensor, ...] = trained.scorer(places)(
        batch.dense_features, batch.sparse_features
    )
    return outputs


def check_takes_ids(trained: TrainedModel, sample: ParitySample) -> None:
    """Check that a model without a schema takes the made-up rows, which have no dense columns.

    Raises:
        ConfigError: the model refuses them.
    """
    ids = ids_of(trained.tables(), sample.batch.sparse_features)
    zeros = {
        table.name: SampledRows(
            ids[table.name], torch.zeros(len(ids[table.name]), table.embedding_dim)
        )
        for table in trained.tables()
    }
    try:
        sample_scores(trained, zeros, sample)
    except RayrecError:
        raise
    # a user's model may raise any type of error for a wrong number of columns
    except Exception as error:
        raise ConfigError(
            f"the checkpoint has no schema, and {type(trained.module).__name__} does not take rows "
            f"of ids alone ({type(error).__name__}: {one_line(error)}). Give schema=, by which it "
            "was trained, or data= with rows of it."
        ) from error
