"""Whole models, unaware of sharding: DLRM, its DCN v2 variant, DeepFM and two-tower retrieval, each with a wrapper that has its loss."""

from rayrec.models.deepfm import DeepFM, DeepFMTrain, FactorizationMachine, FMInteractionArch, SimpleDeepFMNN
from rayrec.models.dlrm import DLRM, DLRM_DCN, DenseArch, DLRMTrain, InteractionArch, InteractionDCNArch, OverArch, SparseArch
from rayrec.models.two_tower import TwoTower, TwoTowerTrain

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "DLRMTrain",
    "DeepFM",
    "DeepFMTrain",
    "DenseArch",
    "FMInteractionArch",
    "FactorizationMachine",
    "InteractionArch",
    "InteractionDCNArch",
    "OverArch",
    "SimpleDeepFMNN",
    "SparseArch",
    "TwoTower",
    "TwoTowerTrain",
]
