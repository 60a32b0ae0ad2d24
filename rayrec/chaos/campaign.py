"""All runs of `rayrec chaos`: one without faults, then one for every seed; and their outcome."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rayrec.chaos.account import RunRecord, table
from rayrec.chaos.cluster import PrivateCluster, private_cluster
from rayrec.chaos.fault_run import FaultRun
from rayrec.chaos.job import Job
from rayrec.chaos.schedule import Campaign, schedule
from rayrec.errors import ConfigError, RayrecError, RunInterrupted
from rayrec.fields.reading import read_record
from rayrec.machine.signals import hold_signals

USER_MISTAKE = "code 2: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of a campaign: a calm run, runs under faults, and the kinds of these."""

    calm: RunRecord
    runs: tuple[RunRecord, ...]
    kinds: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """True if every run ended as the one without faults did."""
        return all(run.is_good(self.calm.digests) for run in self.runs)

    def table(self) -> list[str]:
        """Return the runs as a Markdown table."""
        return table(self.runs, self.calm.digests, self.kinds)

    def to_json(self) -> str:
        """Return the outcome as JSON text, with a verdict beside each run."""
        told = {"good": self.is_good, "kinds": self.kinds, **asdict(self)}
        for run, record in zip(self.runs, told["runs"], strict=True):
            record["verdict"] = run.verdict(self.calm.digests)
        return json.dumps(told, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Return the outcome of such a text."""
        told = json.loads(text)
        del told["good"]
        for record in told["runs"]:
            del record["verdict"]
        outcome: Outcome = read_record(cls, told)
        return outcome


def shake(
    job: Job, campaign: Campaign, say: Callable[[str], None], keep: Callable[[Outcome], None]
) -> Outcome:
    """Run a job without faults, and then under faults.

    The folders of runs that end well are removed. That of another one stays below the job's folder,
    with the job's output beside it.

    Args:
        say: receives a line for every run and every fault.
        keep: receives the outcome so far after every run, since a later one may not end.
    Raises:
        ConfigError: the job ends with a user's mistake when nothing happens to it, or keeps no
            checkpoint.
        RayrecError: Ray does not start, or the job fails when nothing happens to it.
        RunInterrupted: Ctrl-C or SIGTERM ended it; all processes were ended.
    """
    if campaign.nodes and job.ranks < 2:
        raise ConfigError(
            "--nodes needs a job of at least 2 ranks, so that a rank lies on each of two nodes; "
            "give the job --ranks 2, or leave --nodes out."
        )
    made = not job.folder.exists()
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--checkpoint-dir {job.folder} cannot be made: {error.strerror}. Name a folder that "
            "can be written to."
        ) from None
    try:
        with hold_signals() as signals, private_cluster(job, 1 + campaign.nodes) as cluster:

            def one(name: str, seed: int, faults: bool) -> RunRecord:
                drawn = schedule(seed, campaign.every_s, campaign.kinds) if faults else iter(())
                folder = job.folder / name
                run = FaultRun(job, cluster, folder, drawn, campaign, say, signals)
                try:
                    return run.run(seed)
                except (RunInterrupted, KeyboardInterrupt):
                    shutil.rmtree(folder, ignore_errors=True)
                    raise

            say(f"{' '.join(job.words)}: without faults")
            calm = one("calm", 0, False)
            _check_calm(calm)
            _keep_or_remove(job.folder / "calm", cluster, True)
            say(f"  done in {calm.seconds:.1f} s, {len(calm.digests) - 2} tables")
            outcome = Outcome(calm=calm, runs=(), kinds=campaign.kinds)
            for seed in range(campaign.seed, campaign.seed + campaign.runs):
                say(f"seed {seed}")
                run = one(f"seed-{seed}", seed, True)
                good = run.is_good(calm.digests)
                _keep_or_remove(job.folder / f"seed-{seed}", cluster, good)
                say(f"  {run.verdict(calm.digests)}, in {run.seconds:.1f} s")
                outcome = replace(outcome, runs=(*outcome.runs, run))
                keep(outcome)
        return outcome
    finally:
        if made and not any(job.folder.iterdir()):
            job.folder.rmdir()


def _check_calm(calm: RunRecord) -> None:
    """Refuse a job that does not even end well when nothing happens to it."""
    if calm.end == "done":
        return
    told = calm.words.removeprefix(USER_MISTAKE).removeprefix("error: ")
    if calm.words.startswith(USER_MISTAKE):
        raise ConfigError(f"the job's own mistake: {told}")
    raise RayrecError(f"the job {calm.end} without any fault: {calm.words}")


def _keep_or_remove(folder: Path, cluster: PrivateCluster, good: bool) -> None:
    output = cluster.folder / f"{folder.name}.log"
    if good:
        shutil.rmtree(folder, ignore_errors=True)
        output.unlink(missing_ok=True)
    elif output.exists():
        shutil.copyfile(output, folder.parent / output.name)
