"""Whole models that know nothing of sharding: DLRM and its variants, DeepFM, DIN, two
towers.
"""

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
from rayrec.models.multi_task import MultiTaskTrain
from rayrec.models.two_tower import TwoTower, TwoTowerTrain

__all__ = [
    "DIN",
    "DLRM",
    "DLRM_DCN",
    "DLRMTrain",
    "DLRM_Projection",
    "DeepFM",
    "DeepFMTrain",
    "DenseArch",
    "FMInteractionArch",
    "FactorizationMachine",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "MultiTaskTrain",
    "OverArch",
    "SimpleDeepFMNN",
    "SparseArch",
    "TwoTower",
    "TwoTowerTrain",
]
