"""Run of the job under faults: started, struck, restarted, and bounded in time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rayrec.chaos.account import End, InjectedFault, RunRecord, account
from rayrec.chaos.cluster import PrivateCluster
from rayrec.chaos.digests import digests
from rayrec.chaos.job import Job
from rayrec.chaos.moments import AtHand, Moments, doing
from rayrec.chaos.schedule import DRIVER, GCS, NODE, SIGNALS, Campaign, Fault
from rayrec.chaos.stillness import Stillness
from rayrec.machine.signals import Signals
from rayrec.watch import read_events
from rayrec.watch.event_file import NAME

POLL_S = 0.1
# ranks meet in some hundredths of a second
MOMENT_POLL_S = 0.005
# Ray's control service stands still for so long, at least and at most
GCS_S = 20.0, 45.0
WHAT = {DRIVER: "the driver", NODE: "a node", GCS: "Ray's control service"}
Say = Callable[[str], None]


class FaultRun:
    """Run of the job, with the injection of its faults.

    Args:
        folder: folder of the run, which does not exist yet.
        say: receives a line for every fault.
        signals: signals of the user to this command.
    """

    def __init__(
        self,
        job: Job,
        cluster: PrivateCluster,
        folder: Path,
        faults: Iterator[Fault],
        campaign: Campaign,
        say: Say,
        signals: Signals,
    ) -> None:
        self._cluster, self._folder, self._campaign = cluster, folder, campaign
        self._faults, self._say, self._signals = faults, say, signals
        self._command = job.command(folder, waits=cluster.nodes > 1)
        self.output = cluster.folder / f"{folder.name}.log"
        self._blows: list[InjectedFault] = []
        self._moments = Moments(campaign.moments, campaign.faults)
        self._gcs_until: float | None = None
        self._ranks: tuple[float, list[int]] = 0.0, []

    def run(self, seed: int) -> RunRecord:
        """Start the run, inject its faults, and return its record.

        Raises:
            RunInterrupted: the user ended this command.
            ConfigError: the run left no checkpoint.
        """
        started = time.monotonic()
        self._stillness = stillness = Stillness(self._folder / NAME, started)
        process = self._start()
        try:
            fault, due = self._next(started)
            while (code := process.poll()) is None:
                self._signals.check()
                now = time.monotonic()
                still_s = stillness.look(now)
                if still_s > self._campaign.hang_s:
                    words = f"no new step for {still_s:.0f} s, after step {stillness.newest}"
                    return self._told(seed, started, "hung", words)
                if self._gcs_until is not None and now >= self._gcs_until:
                    self._go_on_with_gcs()
                is_due = now >= due and not stillness.is_spared
                at = self._at_hand(fault) if fault is not None and is_due else None
                if fault is not None and at is not None:
                    if self._strike(fault, at, process, now - started):
                        stillness.struck(now)
                    if fault.kind == DRIVER:
                        process = self._start()
                    fault, due = self._next(time.monotonic())
                waits = self._moments.wanted and fault is not None and is_due
                time.sleep(MOMENT_POLL_S if waits else POLL_S)
        finally:
            self._go_on_with_gcs()
            _end(process)
        if code:
            return self._told(seed, started, "failed", f"code {code}: {self._last_line()}")
        return self._told(seed, started, "done", "")

    def _start(self) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as out:
            return subprocess.Popen(
                self._command,
                env=self._cluster.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _next(self, now: float) -> tuple[Fault | None, float]:
        """Return the next fault, and the time on the steady clock at which it is due."""
        if self._campaign.faults is not None and len(self._blows) >= self._campaign.faults:
            return None, 0.0
        fault = next(self._faults, None)
        return fault, now + (fault.after_s if fault is not None else 0.0)

    def _at_hand(self, fault: Fault) -> AtHand | None:
        """Return the moment to strike at now, with the ranks that a signal can strike, or None."""
        wanted = self._moments.wanted and fault.kind in SIGNALS
        looked_at, ranks = self._ranks
        if not wanted or time.monotonic() > looked_at + POLL_S:
            ranks = self._cluster.ranks()
            self._ranks = time.monotonic(), ranks
        if not wanted:
            # a signal waits for a rank
            return AtHand("", tuple(ranks)) if ranks or fault.kind not in SIGNALS else None
        # While the run trains, a process that starts is a spare.
        begun = self._stillness.newest and not self._stillness.recovers
        there = {
            rank: doing(self._cluster.shown, rank) - ({"start"} if begun else set())
            for rank in ranks
        }
        return self._moments.at_hand(there, recovers=self._stillness.recovers)

    def _go_on_with_gcs(self) -> None:
        if self._gcs_until is not None:
            self._cluster.signal_gcs(signal.SIGCONT)
            self._gcs_until = None

    def _strike(
        self, fault: Fault, at_hand: AtHand, process: subprocess.Popen[bytes], since_s: float
    ) -> bool:
        """Inject a fault; return False if its target does not exist."""
        at = time.time()
        struck: tuple[int, ...] = ()
        if fault.kind == DRIVER:
            struck = (process.pid,)
            _end(process)
        elif fault.kind == NODE:
            lost = self._cluster.lose_node()
            struck = () if lost is None else (lost,)
            self._cluster.fill()
        elif fault.kind == GCS:
            struck = self._cluster.signal_gcs(signal.SIGSTOP)
            least, most = GCS_S
            self._gcs_until = time.monotonic() + least + fault.share * (most - least)
        else:
            number = signal.Signals[f"SIG{fault.kind}"]
            for pid in fault.struck(at_hand.ranks):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    struck += (pid,)
        if struck:
            moment = at_hand.moment
            self._moments.struck(moment)
            self._blows.append(InjectedFault(at=at, kind=fault.kind, pids=struck, moment=moment))
            who = " and ".join(map(str, struck))
            what = WHAT.get(fault.kind, f"SIG{fault.kind}")
            when = f"after step {self._stillness.newest}" + (f", at {moment}" if moment else "")
            self._say(f"  +{since_s:6.1f} s  {what}, process {who}, {when}")
        return bool(struck)

    def _told(self, seed: int, started: float, end: End, words: str) -> RunRecord:
        seconds = time.monotonic() - started
        there = (self._folder / NAME).exists()
        events = read_events(self._folder).events if there else ()
        return RunRecord(
            seed=seed,
            end=end,
            words=words,
            seconds=seconds,
            blows=tuple(self._blows),
            account=account(events, [blow for blow in self._blows if blow.kind != GCS]),
            digests=digests(str(self._folder)) if end == "done" else {},
        )

    def _last_line(self) -> str:
        lines = self.output.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job and all processes of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
