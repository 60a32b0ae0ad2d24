"""TorchRec's managed collisions in the drifting world of `benchmarks.dynamic_drift`.

TorchRec's sharder of bags with managed collisions takes no CPU (meta-pytorch/torchrec#2958), but
the unsharded module of TorchRec 1.8 trains on one. Here it takes the place of the tables in a DLRM
of rayrec, whose dense layers, batches and optimizers are those of the other systems. Its table
evicts by LRU in every step, so an id has its row in the step in which it first comes, as in a
dynamic table; an id that is unknown when the rows are scored reads the one row that all such share.

Where an id takes the row of another, the unsharded module leaves that row as it was. TorchRec's
sharded module draws it anew and clears its state before it is read, which `Tables` does on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

import rayrec
from benchmarks.quality_run import Trial
from benchmarks.quality_twin import RowWise
from rayrec.data import FileDataset
from rayrec.recipe import ModelRecipe
from rayrec.train.random_state import seed_all

EVERY = 1  # steps between two evictions
# what a table keeps of its ids
MCH_BUFFERS = ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_last_access_iter")


class Tables(nn.Module):
    """Tables with managed collisions, called as a collection of rayrec is.

    Args:
        tables: names, sizes and features.
        bound: rows start within +- this.
    """

    def __init__(self, tables: Sequence[rayrec.EmbeddingBagConfig], bound: float) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=table.embedding_dim,
                num_embeddings=table.num_embeddings,
                feature_names=table.feature_names,
                weight_init_min=-bound,
                weight_init_max=bound,
            )
            for table in tables
        ]
        modules = {
            table.name: MCHManagedCollisionModule(
                table.num_embeddings, torch.device("cpu"), LRU_EvictionPolicy(), EVERY
            )
            for table in tables
        }
        self.bound, self.bags = bound, EmbeddingBagCollection(configs)
        self.ids = ManagedCollisionCollection(modules, configs)
        self.both = ManagedCollisionEmbeddingBagCollection(self.bags, self.ids)

    def forward(self, features: rayrec.KeyedJaggedTensor) -> rayrec.KeyedTensor:
        """Rows of the ids, which get their rows first if the module is in training."""
        lengths = features.lengths().long()
        found, _ = self.both(KeyedJaggedTensor(features.keys(), features.values(), lengths=lengths))
        return rayrec.KeyedTensor(found.keys(), found.length_per_key(), found.values())

    def start_rows_anew(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on, draw a row that goes to another id anew before it is read."""

        def start(ids: ManagedCollisionCollection, *_: Any) -> None:
            for table, rows in ids.evict().items():
                if rows is None:
                    continue
                weight = self.bags.embedding_bags[table].weight
                weight.data[rows] = torch.empty(len(rows), weight.shape[1]).uniform_(
                    -self.bound, self.bound
                )
                for state in optimizer.state[weight].values():
                    state[rows] = 0

        self.ids.register_forward_hook(start)


def logloss_of(
    model: ModelRecipe, train: FileDataset, held_out: FileDataset, trial: Trial, anew: bool
) -> float:
    """Train on the rows in their order, and return the log loss of those that are held out.

    Args:
        model: the model with the tables of rayrec, which others replace.
        anew: a row that goes to another id starts anew.
    """
    torch.set_num_threads(1)  # as many as the rank of a run has
    recipe = trial.recipe
    assert model.init_bound is not None and recipe.epochs == 1 and recipe.decay == "constant"
    seed_all(trial.seed)  # the first numbers are those of the dense layers, as in a run
    module: Any = model()
    arch = module.model.sparse_arch
    tables = Tables(arch.embedding_bag_collection.embedding_bag_configs(), model.init_bound)
    arch.embedding_bag_collection = tables
    sparse = RowWise(tables.bags.parameters(), lr=recipe.tables.lr)
    if anew:
        tables.start_rows_anew(sparse)
    others = [
        p for name, p in module.named_parameters() if not name.startswith("model.sparse_arch")
    ]
    dense = torch.optim.Adam(others, lr=recipe.dense.lr)
    with train.loader(0, 1, recipe.batch, seed=trial.seed, shuffle=False) as batches:
        for batch in batches:
            module.zero_grad()
            module(batch)[0].backward()
            sparse.step()
            dense.step()
    module.eval()
    losses: list[Tensor] = []
    with torch.no_grad(), held_out.loader(0, 1, recipe.batch, shuffle=False) as batches:
        for batch in batches:
            _, (_, logits, labels) = module(batch)
            losses.append(
                functional.binary_cross_entropy_with_logits(
                    logits.double(), labels.double(), reduction="none"
                )
            )
    return float(torch.cat(losses).mean())
