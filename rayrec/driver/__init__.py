"""The driver: Ray as the control plane of a training run.

No other part of rayrec imports ray and the actors.
"""

from __future__ import annotations

from rayrec.driver.calibration import calibrate
from rayrec.driver.config import FailureConfig, RunConfig
from rayrec.driver.driver import Driver
from rayrec.driver.fitting import Result
from rayrec.driver.ray_data import RayDataset
from rayrec.driver.ray_metrics import RayMetrics
from rayrec.driver.scaling import ScalingConfig
from rayrec.spec.task import Task
from rayrec.train.callbacks import Callback
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.optimizer_config import OptimizerConfig
from rayrec.train.profile_config import ProfileConfig
from rayrec.train.publish_config import PublishConfig
from rayrec.train.shaping import EarlyStopping, EvaluationConfig

__all__ = [
    "Callback",
    "CheckpointConfig",
    "Driver",
    "EarlyStopping",
    "EvaluationConfig",
    "FailureConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "PublishConfig",
    "RayDataset",
    "RayMetrics",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "Task",
    "calibrate",
]
