"""Exports leave nothing of torch's tracing behind, since a run that publishes makes many."""

from __future__ import annotations

import gc
import linecache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rayrec.layout import EmbeddingBagConfig
from rayrec.models import DLRMTrain
from rayrec.modules import EmbeddingBagCollection
from rayrec.serve.program import MODEL, GivenBags, export_program, load_program
from rayrec.serve.scorer import Scorer
from rayrec.serve.weights import _with_dense
from rayrec.sparse import KeyedJaggedTensor


class _Click(nn.Module):
    def __init__(self, bags: GivenBags) -> None:
        super().__init__()
        self.bags = bags
        self.over = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(torch.cat([dense, self.bags(ids).values()], dim=1))
        return logits


@pytest.mark.slow
def test_exports_and_versions_leave_no_symbols_and_no_sources(tmp_path: Path) -> None:
    shapes = pytest.importorskip("torch.fx.experimental.symbolic_shapes")
    table = EmbeddingBagConfig(10, 2, "t", feature_names=["f"])
    given = GivenBags(EmbeddingBagCollection([table]))
    scorer = Scorer(DLRMTrain(_Click(given))).eval()
    counts = []
    for _ in range(4):
        assert export_program(scorer, {"bags": given}, 3, tmp_path / "program") == ""
        gc.collect()
        symbols = sum(type(one) is shapes.ShapeEnv for one in gc.get_objects())
        counts.append((symbols, len(linecache.cache)))
    assert counts[-1] == counts[1], counts
    loaded = load_program((tmp_path / "program").read_bytes(), tmp_path / "program")
    assert loaded(torch.randn(7, 3), torch.randn(7, 2))[0].shape == (7,)
    dense = {key.removeprefix(MODEL): one for key, one in loaded.state_dict().items()}
    before = len(linecache.cache)
    for number in range(4):
        loaded = _with_dense(loaded, {key: one + 1 for key, one in dense.items()}, f"{number}")
    assert loaded(torch.randn(7, 3), torch.randn(7, 2))[0].shape == (7,)
    assert len(linecache.cache) == before
