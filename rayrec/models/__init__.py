"""Whole models, unaware of sharding: DLRM, its DCN v2 variant, and the training wrapper with the loss."""

from rayrec.models.dlrm import DLRM, DLRM_DCN, DenseArch, DLRMTrain, InteractionArch, InteractionDCNArch, OverArch, SparseArch

__all__ = ["DLRM", "DLRM_DCN", "DLRMTrain", "DenseArch", "InteractionArch", "InteractionDCNArch", "OverArch", "SparseArch"]
