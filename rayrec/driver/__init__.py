"""The driver: Ray as the control plane of a training run.

No other part of rayrec imports ray and the actors.
"""

from rayrec.driver.calibration import calibrate
from rayrec.driver.config import FailureConfig, RunConfig, ScalingConfig
from rayrec.driver.driver import Driver
from rayrec.driver.ray_metrics import RayMetrics
from rayrec.driver.result import Result
from rayrec.spec.task import Task
from rayrec.train.callbacks import Callback
from rayrec.train.config import CheckpointConfig, OptimizerConfig, ProfileConfig
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
    "RayMetrics",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "Task",
    "calibrate",
]
