"""What the click jobs share: a model by name and sizes (`ModelRecipe`), which a checkpoint carries so that it can be built again, the
options of a run's placement, and how a job ends: one line and code 2 for a user's mistake, the cause and code 1 for a failed run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.errors import CheckpointError, ConfigError, InputError, PlanError, RayrecError, TrainingFailed, VersionError
from rayrec.train.config import ProfileConfig
from rayrec.train.profile_page import Profile
from rayrec.train.progress import Milestone

if TYPE_CHECKING:
    from torch import nn

    from rayrec.data import FileDataset
    from rayrec.driver import ScalingConfig

MODELS = ("dlrm", "dcn")
USER_MISTAKES = (ConfigError, PlanError, InputError, CheckpointError, VersionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecipe:
    """A click model as plain data; calling it builds the module, tables on the meta device.

    Attributes:
        model: "dlrm" or "dcn".
        schema: the JSON text of the feature schema.
        dense_layers: of the dense MLP before its last layer, which is as wide as the tables.
        over_layers: of the over MLP before its one logit.
        cross_layers, cross_rank: of dcn's cross network.
    Raises:
        ConfigError: the model is not known.
    """

    model: str
    schema: str
    dense_layers: tuple[int, ...] = (64,)
    over_layers: tuple[int, ...] = (64, 32)
    cross_layers: int = 2
    cross_rank: int = 16

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"model {self.model!r} is not known; choose one of {', '.join(MODELS)}.")

    def __call__(self) -> nn.Module:
        """Build the module with its loss."""
        from rayrec.data import FeatureSchema
        from rayrec.models import DLRM, DLRM_DCN, DLRMTrain
        from rayrec.modules import EmbeddingBagCollection

        schema = FeatureSchema.from_json(self.schema, "the recipe's schema")
        tables = schema.embedding_bag_configs()
        collection = EmbeddingBagCollection(tables=tables, is_weighted=schema.is_weighted, device="meta")
        dense, over = [*self.dense_layers, tables[0].embedding_dim], [*self.over_layers, 1]
        if self.model == "dlrm":
            return DLRMTrain(DLRM(collection, len(schema.dense), dense, over))
        return DLRMTrain(DLRM_DCN(collection, len(schema.dense), dense, over, self.cross_layers, self.cross_rank))

    def to_extras(self) -> dict[str, Any]:
        """JSON data for a checkpoint's extras."""
        return {"recipe": asdict(self)}

    @classmethod
    def from_extras(cls, extras: Mapping[str, Any], source: str) -> ModelRecipe:
        """What `to_extras` gave.

        Raises:
            ConfigError: the checkpoint was not written by one of these jobs.
        """
        try:
            fields = dict(extras["recipe"])
            return cls(**{**fields, "dense_layers": tuple(fields["dense_layers"]), "over_layers": tuple(fields["over_layers"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{source} does not say how to build its model ({error!r}); it was not written by jobs.train_dlrm.") from None


def add_scaling_options(parser: argparse.ArgumentParser) -> None:
    """Options of where the ranks run."""
    default = min(2, os.cpu_count() or 1)
    parser.add_argument("--ranks", type=int, default=default, help=f"number of ranks, one Ray actor each (default here {default})")
    parser.add_argument("--plan", default="auto", help="auto, a sharding kind such as row_wise for all tables, or a plan's JSON file")
    parser.add_argument("--gpu", action="store_true", help="one GPU per rank and NCCL; default is CPU and gloo")
    cpus = "CPUs that Ray reserves for a rank, also its number of threads (at least one), may be a fraction (default 1)"
    parser.add_argument("--cpus-per-rank", type=float, default=1, help=cpus)
    parser.add_argument("--pin-cores", action="store_true", help="pin every CPU rank to cores of its own; see docs/performance.md")
    parser.add_argument("--placement-timeout", type=float, default=120, help="seconds to wait for room on the cluster (default 120)")


def add_profile_options(parser: argparse._ArgumentGroup) -> None:
    """Options of `profile_of`."""
    parser.add_argument("--profile", metavar="DIR", help="time some steps by part and trace as many; DIR gets the traces and a summary")
    parser.add_argument("--profile-steps", type=int, default=10, help="so many are timed, and then as many traced (default 10)")
    parser.add_argument("--profile-skip", type=int, default=5, help="steps before them (default 5)")


def profile_of(args: argparse.Namespace) -> ProfileConfig | None:
    """What the options say, None without --profile.

    Raises:
        ConfigError: they contradict themselves.
    """
    if args.profile is None:
        return None
    return ProfileConfig(path=args.profile, skip_steps=args.profile_skip, steps=args.profile_steps)


def print_profile(profile: Profile | None) -> None:
    """Show the page of a profile, if there is one, and where it lies."""
    if profile is not None:
        print(f"{profile.text()}\nprofile: {profile.folder}")


def scaling_of(args: argparse.Namespace) -> ScalingConfig:
    """Where the ranks run, by the options that `add_scaling_options` added.

    Raises:
        ConfigError: they contradict each other.
    """
    from rayrec.driver import ScalingConfig

    return ScalingConfig(
        num_workers=args.ranks,
        use_gpu=args.gpu,
        cpus_per_worker=args.cpus_per_rank,
        placement_timeout_s=args.placement_timeout,
        pin_cores=args.pin_cores,
    )


def open_data(path: str, schema: str) -> FileDataset:
    """A dataset of Parquet files, or of Arrow IPC files when the path's files end in .arrow or .feather.

    Raises:
        ConfigError: the schema contradicts itself.
        InputError: there is nothing to read.
    """
    from rayrec.data import ArrowDataset, FeatureSchema, ParquetDataset

    folder = Path(path)
    names = [path] if folder.is_file() else [str(p) for p in folder.glob("**/*")] if folder.is_dir() else [path]
    kind = ArrowDataset if any(name.endswith((".arrow", ".feather")) for name in names) else ParquetDataset
    return kind(path, FeatureSchema.from_json(schema, "the schema"))


def read_text(path: str) -> str:
    """The text of a local file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def scores_beside_truth(metrics: Mapping[str, float], eval_path: str, truth_path: str | None = None) -> dict[str, float]:
    """Metrics as they are, with bayes_auc and regret when truth.json lies beside the evaluation data."""
    from rayrec.metrics import Truth

    scores = dict(metrics)
    path = Path(truth_path) if truth_path else Path(eval_path).parent / "truth.json"
    if path.is_file() and scores:
        truth = Truth.load(path)
        if truth.rows == scores.get("rows"):
            scores |= {"bayes_auc": truth.bayes_auc, "bayes_ne": truth.bayes_ne, "regret": truth.bayes_auc - scores["auc"]}
    return scores


def scores_line(scores: Mapping[str, float]) -> str:
    """Scores on one line."""
    order = ("auc", "bayes_auc", "regret", "ne", "logloss", "calibration", "rows")
    return "  ".join(f"{name} {scores[name]:.5f}" if name != "rows" else f"rows {scores[name]:.0f}" for name in order if name in scores)


def write_result(path: str | None, result: Mapping[str, Any]) -> None:
    """Write JSON; nothing without a path. The file appears whole or not at all.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    if path is None:
        return
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            json.dump(_finite(result), file, indent=1)
        Path(file.name).replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write the result to {path}: {error}") from None


def process_start() -> float:
    """When this process began, in seconds of the wall clock; now, where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, AttributeError):
        return time.time()


def seconds_by_part(timing: Sequence[Milestone]) -> dict[str, float]:
    """Seconds from each milestone to the next, by the name of the later one."""
    ordered = sorted(timing, key=lambda milestone: milestone.at)
    return {b.name: round(b.at - a.at, 3) for a, b in pairwise(ordered)}


def timing_table(timing: Sequence[Milestone]) -> str:
    """The parts of a start-up, one a line, with their sum."""
    parts = seconds_by_part(timing)
    lines = [f"  {name:<24}{seconds:7.2f} s" for name, seconds in parts.items()]
    return "\n".join(["start-up, by part:", *lines, f"  {'to the first step':<24}{sum(parts.values()):7.2f} s"])


def run_job(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Call a job's main and turn errors into one line on stderr and an exit code: 2 for a user's mistake, 1 for a failed run."""
    try:
        return main(argv)
    except TrainingFailed as error:
        if error.traceback:
            print(error.traceback.rstrip(), file=sys.stderr)
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except USER_MISTAKES as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except RayrecError as error:
        print(f"failed: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _finite(value: Any) -> Any:
    """JSON has no nan: such scores become null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value
