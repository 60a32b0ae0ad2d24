"""Training on one rank: the step, the loop over a run, and what ranks report.

Heavy names load on first use, so that an actor can set its environment before torch is imported.
"""

from __future__ import annotations

from rayrec.lazy import lazy_names

_HOME = {
    "CheckpointConfig": "rayrec.train.checkpoint_config",
    "OptimizerConfig": "rayrec.train.optimizer_config",
    "ProfileConfig": "rayrec.train.profile_config",
    "PublishConfig": "rayrec.train.publish_config",
    "TrainSpec": "rayrec.train.config",
    "ProgressReport": "rayrec.train.events",
    "StepResult": "rayrec.train.step",
    "train_step": "rayrec.train.step",
    "RankTrainer": "rayrec.train.loop",
    "FitTask": "rayrec.train.tasks",
    "FitOutcome": "rayrec.train.outcome",
    "LoopContext": "rayrec.train.own_loop",
    "EvaluateTask": "rayrec.train.tasks",
    "EvalPipeline": "rayrec.train.pipeline",
    "EvalPipelineSparseDist": "rayrec.train.pipeline",
    "PipelineOptions": "rayrec.train.pipeline",
    "TrainPipelineBase": "rayrec.train.pipeline",
    "TrainPipelineSparseDist": "rayrec.train.pipeline",
}
__all__ = sorted(_HOME)
__getattr__ = lazy_names(__name__, _HOME)
