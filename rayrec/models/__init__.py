"""Whole models that know nothing of sharding: click models, two towers, next-item models."""

from rayrec.models.deepfm import (
    DeepFM,
    DeepFMTrain,
    FactorizationMachine,
    FMInteractionArch,
    SimpleDeepFMNN,
)
from rayrec.models.din import DIN
from rayrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from rayrec.models.dlrm_parts import (
    DenseArch,
    InteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    OverArch,
    SparseArch,
)
from rayrec.models.full_ranking import ItemPlaces, Lists, best_items, rank_items, rank_scores
from rayrec.models.hstu_ranking import HSTURanking
from rayrec.models.mmoe import MMoE
from rayrec.models.multi_task import MultiTaskTrain
from rayrec.models.next_item import NextItem, NextItemTrain
from rayrec.models.ple import PLE
from rayrec.models.softmax import FullSoftmax, SampledSoftmax
from rayrec.models.two_tower import TwoTower
from rayrec.models.two_tower_train import TwoTowerTrain

__all__ = [
    "DIN",
    "DLRM",
    "DLRM_DCN",
    "PLE",
    "DLRMTrain",
    "DLRM_Projection",
    "DeepFM",
    "DeepFMTrain",
    "DenseArch",
    "FMInteractionArch",
    "FactorizationMachine",
    "FullSoftmax",
    "HSTURanking",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "ItemPlaces",
    "Lists",
    "MMoE",
    "MultiTaskTrain",
    "NextItem",
    "NextItemTrain",
    "OverArch",
    "SampledSoftmax",
    "SimpleDeepFMNN",
    "SparseArch",
    "TwoTower",
    "TwoTowerTrain",
    "best_items",
    "rank_items",
    "rank_scores",
]
