"""The driver: Ray as the control plane of a training run.

No other part of rayrec imports ray and the actors.
"""

from rayrec.driver.calibration import calibrate
from rayrec.driver.config import FailureConfig, Result, RunConfig, ScalingConfig
from rayrec.driver.driver import Driver
from rayrec.train.config import CheckpointConfig, OptimizerConfig, ProfileConfig

__all__ = [
    "CheckpointConfig",
    "Driver",
    "FailureConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "calibrate",
]
