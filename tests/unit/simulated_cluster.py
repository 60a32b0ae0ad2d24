"""A simulated cluster that drives the real `decide`: nodes, places, processes and ranks at work.

Nodes come, go, and are announced to go. Processes die, freeze, answer late, raise, and do not meet.
The head of the cluster falls silent, and the driver sleeps. All of it follows from one seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from rayrec.driver.cluster import Cluster
from rayrec.driver.commands import (
    Abort,
    Ask,
    Begin,
    Call,
    Command,
    EndProcess,
    GiveBack,
    Keep,
    Plan,
    Save,
    StartProcess,
    Stop,
    Tell,
)
from rayrec.driver.decide import decide
from rayrec.driver.placement import NOTICE_AFTER_S
from rayrec.driver.policies import COLLECT_S
from rayrec.driver.replay import Look
from rayrec.driver.roster import Place, Role
from rayrec.driver.run import Rules, Run
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.states import Ended, Filling, Planning, Running
from rayrec.driver.views import Pause, Planned, ProcessView, Reply, Resources, Rooms, Verb, View
from rayrec.errors import InputError, JoinError, PlanError
from rayrec.shards.undo import Point, common_point
from rayrec.train.events import Began, Event
from rayrec.train.progress import RankPoll
from rayrec.train.rank_error import RankError
from rayrec.train.seat import RankAddress

TURN_S = 0.2
STEP_S = 0.4
STEPS = 40
SYNC_EVERY = 3
SAVE_EVERY = 5
QUIET_AFTER_S = 120.0  # from then on nothing is harmed any more
ROOM_S = 60.0  # longest wait for room


@dataclass(kw_only=True)
class Node:
    """A node with room for some processes; `goes_at` is when a draining one goes.

    The head of the cluster counts a lost one as alive until `known_at`.
    """

    slots: int
    alive: bool = True
    known_at: float = 0.0
    draining: bool = False
    goes_at: float = math.inf


@dataclass(kw_only=True)
class Group:
    """A placement group, and the node of each bundle that was given."""

    ask: Ask
    nodes: dict[int, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Process:
    """A process; `hears_at` is when it answers again, `view` what the driver saw last.

    One that is `stopped` is known to be; another that does not answer may only be busy. One that
    `hangs` answers polls, and never fetches a task.
    """

    number: int
    place: Place
    born_at: float
    node: str = ""
    alive: bool = True
    died_at: float = math.inf
    hears_at: float = 0.0
    stopped: bool = False
    hangs: bool = False
    state: str = "idle"
    step: int = 0
    error: RankError | None = None
    generation: int = 0
    stops: int | None = None
    fails_at: float = math.inf
    result: Pause | None = None
    view: ProcessView = field(default_factory=ProcessView)


@dataclass(kw_only=True)
class World:
    """Ranks that meet for one task; the processes are in the order of the ranks."""

    generation: int
    size: int
    first: bool
    members: dict[int, Process] = field(default_factory=dict)
    trains_at: float = math.inf  # not known before all are there
    begun: bool = False
    next_step_at: float = 0.0
    saves: bool = False


class Simulation:
    """One run on a simulated cluster.

    Args:
        draw: source of all chance.
        scaling: number of ranks. hazard: chance of each kind of harm in a second.
        max_failures: failures that the run recovers from. resizes: the ranks may change.
    """

    def __init__(
        self,
        draw: random.Random,
        scaling: ScalingConfig,
        hazard: float,
        *,
        max_failures: int = -1,
        resizes: bool = True,
        drains: bool = False,
        stops: bool = False,
    ) -> None:
        self.draw, self.scaling, self.hazard = draw, scaling, hazard
        self.drains, self.may_stop = drains, stops
        self.run = Run.of(
            Rules(
                scaling=scaling,
                cluster=Cluster(private=False, fixed=draw.random() < 0.3),
                here="n0",
                heartbeat_s=10.0,
                max_failures=max_failures,
                resizes=resizes,
                keeps=resizes,
                obeys_stop=resizes,
            )
        )
        self.now = 100.0
        self.names = (f"n{number}" for number in count())
        self.nodes: dict[str, Node] = {}
        for _ in range(draw.randint(1, 3)):
            self.add_node()
        self.groups: dict[int, Group] = {}
        self.processes: dict[int, Process] = {}
        self.worlds: list[World] = []
        self.pending: list[tuple[float, Reply]] = []
        self.events: list[Event] = []
        self.told: list[Event] = []
        self.planned: Planned | None = None
        self.rooms: Rooms | None = None
        self.head_hears_at = 0.0
        self.saved, self.handed_at, self.holders = 0, None, set[int]()
        self.kept: dict[Place, list[Point]] = {}
        self.all_had: Point | None = None
        self.line = self.mistakes = self.from_memory = self.called_off = self.looks = 0
        self.stops, self.signal = False, None
        self.arranged: tuple[Place, ...] = ()
        self.wish: int | None = None
        self.unfit = set[int]()  # numbers of ranks that no plan fits
        self.loses_nodes, self.planned_first = True, False
        self.records, self.log = False, list[Look]()

    # ---- the run

    def play(self) -> Ended:
        """Play the run to its end, with all checks at every look."""
        while not self.run.has_ended:
            self.look_once()
            assert self.now < QUIET_AFTER_S + 2000, f"no end in sight in {self.run.state}"
        state = self.run.state
        assert isinstance(state, Ended)
        return state

    def look_once(self) -> None:
        """Let the cluster go on for a moment, and the driver look at it, decide and act."""
        self.pass_time(0.01 if self.run.hurries else TURN_S)
        self.sleep()
        view = self.view()
        commands = decide(self.run, view)
        state = self.run.state
        if view.stops and isinstance(state, Filling) and state.deadline is None:
            is_new = state.since > view.now - NOTICE_AFTER_S
            assert is_new or self.run.handed_over, "it waits, and shall end"
        self.looks += 1
        if self.records:
            self.log.append(Look.of(view, self.run, commands))
        # a callback that is told of what was decided may take long
        self.sleep()
        self.do(commands)
        self.check()

    def sleep(self) -> None:
        """Have the driver sleep now and then, while all others go on."""
        if self.harms(0.1):
            for _ in range(self.draw.randint(5, 300)):
                self.pass_time(TURN_S)

    def check(self) -> None:
        """Check what must hold after every decision."""
        roster, rules = self.run.roster, self.run.rules
        places = [seat.place for seat in roster.seats]
        assert len(places) == len(set(places)), "two processes for one place"
        processes = [seat.process for seat in roster.seats if seat.process is not None]
        assert len(processes) == len(set(processes)), "one process in two seats"
        if not self.run.has_ended:
            assert set(self.processes) == set(processes), "a process that nobody knows of"
        assert set(self.groups) == set(roster.groups), "a group that nobody knows of"
        bound = 1 + rules.scaling.spares + 2 * rules.scaling.most
        assert len(self.groups) <= bound, "places that nobody needs"
        if roster.ranks and not isinstance(self.run.state, Filling):
            assert rules.scaling.least <= len(roster.ranks) <= rules.scaling.most
        assert len(roster.of(Role.SPARE)) <= rules.scaling.spares
        running = {p.generation for p in self.processes.values() if p.state == "running"}
        assert len(running) <= 1, "ranks train in two worlds at once"

    # ---- the cluster

    def add_node(self) -> None:
        self.nodes[next(self.names)] = Node(slots=self.draw.randint(1, 3))

    def harms(self, factor: float = 1.0) -> bool:
        quiet = self.now > QUIET_AFTER_S + 100
        return not quiet and self.draw.random() < self.hazard * factor * TURN_S

    def pass_time(self, seconds: float) -> None:
        """Let the cluster go on: harm comes, places are given, ranks work."""
        self.now += seconds
        self.harm()
        self.give_places()
        for process in self.processes.values():
            self.grow_up(process)
        for world in self.worlds[-2:]:
            self.work(world)

    def harm(self) -> None:
        for process in list(self.processes.values()):
            if process.alive and self.harms(0.5):
                what = self.draw.choice(["kill", "kill", "freeze", "stop", "raise", "mistake"])
                if what == "kill":
                    self.kill(process)
                elif what in ("freeze", "stop"):
                    # some wake up again
                    process.stopped = process.stopped or what == "stop"
                    asleep_s = 1e9 if process.stopped else self.draw.random() * 40
                    process.hears_at = self.now + asleep_s
                elif process.state == "running":
                    mistake = what == "mistake" and self.draw.random() < 0.1
                    error: Exception = InputError("bad id") if mistake else ValueError("cursed")
                    self.mistakes += mistake
                    self.fail(process, error)
        for name, node in list(self.nodes.items()):
            lost = self.loses_nodes and self.harms(0.3)
            if node.alive and (self.now >= node.goes_at or lost):
                # a machine that ends is missed later than its processes
                self.lose_node(name, self.draw.choice([0.0, 15 * self.draw.random()]))
            elif node.alive and self.drains and not node.draining and self.harms():
                node.draining = True
                if self.draw.random() < 0.7:
                    node.goes_at = self.now + self.draw.random() * 100
        if len([n for n in self.nodes.values() if n.alive]) < 4 and (self.harms() or self.poor()):
            self.add_node()
        if self.harms():
            self.head_hears_at = self.now + self.draw.random() * 30
        if self.run.rules.scaling.is_elastic and self.harms():
            least, most = self.scaling.least, self.scaling.most
            self.wish = self.draw.randint(least, most)
        if self.may_stop and self.harms(0.3):
            self.stops = True
            if self.draw.random() < 0.5:
                self.signal = 15

    def poor(self) -> bool:
        """Return True, now and then, while the cluster has too little room for the ranks."""
        return self.room() < self.scaling.least and self.draw.random() < 0.02

    def room(self) -> int:
        """Return the number of processes that have room on nodes that stay."""
        return sum(n.slots for n in self.nodes.values() if n.alive and not n.draining)

    def kill(self, process: Process) -> None:
        process.alive, process.died_at = False, self.now + self.draw.random()

    def lose_node(self, name: str, known_s: float = 0.0) -> None:
        self.nodes[name].alive, self.nodes[name].known_at = False, self.now + known_s
        for process in self.processes.values():
            if process.node == name and process.alive:
                self.kill(process)
        for place in [p for p in self.kept if self.node_of(p) == name]:
            self.kept[place].clear()
            self.all_had = None

    def counts(self, name: str) -> bool:
        """Return True if the head of the cluster takes a node for alive."""
        return self.nodes[name].alive or self.now < self.nodes[name].known_at

    def node_of(self, place: Place) -> str:
        group = self.groups.get(place.group)
        return group.nodes.get(place.bundle, "") if group else ""

    def give_places(self) -> None:
        """Give places to groups that lack some, as Ray does."""
        for group in self.groups.values():
            lost = [b for b, n in group.nodes.items() if not self.counts(n)]
            for bundle in lost:
                del group.nodes[bundle]
            missing = [b for b in range(group.ask.bundles) if b not in group.nodes]
            used = [n for other in self.groups.values() for n in other.nodes.values()]
            free = [
                name
                for name, node in self.nodes.items()
                if node.alive and not node.draining
                for _ in range(node.slots - used.count(name))
            ]
            if group.ask.strategy == "STRICT_PACK" and group.ask.near in free:
                free.insert(0, group.ask.near)
            # a group that was whole gets its places back one by one
            if lost or len(missing) < group.ask.bundles or len(free) >= len(missing):
                group.nodes |= dict(zip(missing, free, strict=False))

    def grow_up(self, process: Process) -> None:
        """Have a process be born once its place is there."""
        if process.node or self.now < process.born_at:
            return
        process.node = self.node_of(process.place)
        if process.node and not self.nodes[process.node].alive:
            process.node = ""

    def hears(self, process: Process) -> bool:
        return process.alive and bool(process.node) and process.hears_at <= self.now

    def fail(self, process: Process, error: Exception) -> None:
        told = RankError.of(error, process.step)
        process.state, process.error = "failed", replace(told, at=self.now)
        process.fails_at = math.inf

    # ---- ranks at work

    def work(self, world: World) -> None:
        members = list(world.members.values())
        broken = len(members) == world.size and any(
            not p.alive or p.generation != world.generation or p.state == "failed" for p in members
        )
        for process in members:
            if process.generation != world.generation or process.state != "running":
                continue
            if broken and process.fails_at == math.inf:
                # one in ten hangs until its connections are cut
                hangs = self.draw.random() < 0.1
                process.fails_at = 1e12 if hangs else self.now + self.draw.random() * 2 * COLLECT_S
            if process.fails_at <= self.now and self.hears(process):
                self.fail(process, ConnectionResetError("closed by peer"))
        whole = len(members) == world.size and not broken
        if not whole or not all(self.hears(p) and p.state == "running" for p in members):
            return
        if not world.begun:
            if world.trains_at == math.inf:
                world.trains_at = self.now + self.restores_s(world)
            if self.now >= world.trains_at:
                self.meet(world, members)
        elif self.now >= world.next_step_at:
            world.next_step_at = self.now + STEP_S
            self.step(world, members)

    def restores_s(self, world: World) -> float:
        """Return the seconds that the ranks of a world need before they train."""
        return 0.0 if world.first or self.draw.random() < 0.7 else 10 * self.draw.random()

    def meet(self, world: World, members: Sequence[Process]) -> None:
        world.begun, world.next_step_at = True, self.now + STEP_S
        if self.harms(20):
            # nobody is dead, and one cannot reach the others
            for process in members:
                self.fail(process, JoinError(f"no one at :{self.now:.0f}00"))
        elif not world.first:
            step = self.begin_at(members)
            for process in members:
                process.step = step
            self.events.append(Began(step=step, path=None))

    def begin_at(self, members: Sequence[Process]) -> int:
        """Return the step where a world begins: of tables handed over, of memory, or of a save."""
        places = tuple(process.place for process in members)
        if self.handed_at is not None or places != self.arranged:
            # memory is called by the arrangement of the ranks, and another one begins without any
            self.kept = {place: [] for place in places}
            self.all_had, self.arranged = None, places
        if self.handed_at is not None:
            step, self.handed_at = self.handed_at, None
            self.line += 1
            point = Point(self.line, step)
        else:
            kept = [self.kept.setdefault(place, []) for place in places]
            found = common_point(kept, self.saved)
            had = self.all_had
            if had is not None and had.step >= self.saved:
                assert found is not None and found.step >= had.step, "what all had is not lost"
            if found is None:
                self.line += 1
                found = Point(self.line, self.saved)
            else:
                assert found.line == self.line, "of another past"
                self.from_memory += 1
            point = found
        assert point.step >= self.saved, "what was saved is not lost"
        for place in places:
            self.kept[place] = [point]
        self.all_had = point
        return point.step

    def step(self, world: World, members: Sequence[Process]) -> None:
        if world.first:
            assert self.holders <= {p.number for p in members}, "tables without their keeper"
            for process in members:
                process.state = "done"
            return
        step = members[0].step + 1
        assert world.generation == self.run.generation, "an old world trains"
        for process in members:
            process.step = step
        self.sync(members, step)
        asked = [p.stops for p in members if p.stops is not None]
        if step >= STEPS:
            self.end(members, Pause(stopped=False, handed_over=False))
        elif len(asked) == len(members):
            handed = max(asked) > 0 and self.draw.random() < 0.7
            if handed:
                self.handed_at, self.holders = step, {p.number for p in members}
            else:
                self.saved = step
            self.end(members, Pause(stopped=True, handed_over=handed))
        elif world.saves or step % SAVE_EVERY == 0:
            world.saves, self.saved = False, step

    def sync(self, members: Sequence[Process], step: int) -> None:
        """Have ranks set the sync point of their step."""
        if step % SYNC_EVERY:
            return
        point = Point(self.line, step)
        for process in members:
            points = self.kept.setdefault(process.place, [])
            points[:] = [*points[-1:], point]
        self.all_had = point

    def end(self, members: Sequence[Process], result: Pause) -> None:
        for process in members:
            process.state, process.result = "done", result

    # ---- what the driver sees

    def view(self) -> View:
        for process in self.processes.values():
            self.show(process)
        due = [reply for at, reply in self.pending if at <= self.now and self.answers(reply)]
        self.pending = [one for one in self.pending if one[1] not in due]
        # only a process that was born knows its node
        due = [
            replace(reply, value=address(self.processes[reply.process]))
            if reply.verb == "describe" and not reply.cause
            else reply
            for reply in due
        ]
        alive = frozenset(filter(self.counts, self.nodes))
        if "rooms" in self.run.needs and self.head_hears_at <= self.now:
            self.rooms = Rooms(
                asked_at=self.now,
                alive=alive,
                draining={
                    name: None if node.goes_at == math.inf else node.goes_at
                    for name, node in self.nodes.items()
                    if name in alive and node.draining
                },
                nodes={
                    Place(number, bundle): name
                    for number, group in self.groups.items()
                    for bundle, name in group.nodes.items()
                    if name in alive
                },
            )
        used = [n for group in self.groups.values() for n in group.nodes.values()]
        free = [{"CPU": float(self.nodes[n].slots - used.count(n))} for n in sorted(alive)]
        total = sum(self.nodes[n].slots for n in alive)
        events: tuple[Event, ...] = ()
        if isinstance(self.run.state, Running):
            events, self.events = tuple(self.events), []
        planned, self.planned = self.planned, None
        wish, self.wish = self.wish, None
        return View(
            now=self.now,
            wall=self.now,
            processes={number: p.view for number, p in self.processes.items()},
            replies=tuple(due),
            rooms=self.rooms,
            resources=Resources({"CPU": float(total)}, tuple(free)),
            events=events,
            planned=planned,
            stops=self.stops,
            signal=self.signal,
            wish=wish,
        )

    def show(self, process: Process) -> None:
        """Have the driver see what a process says; one answer in five comes late."""
        if not process.alive and self.now >= process.died_at:
            died = replace(process.view, death="its process died", death_at=process.died_at)
            process.view = died
            return
        begins = any(r.process == process.number and r.verb == "begin" for _, r in self.pending)
        if begins or not self.hears(process) or self.draw.random() < 0.2:
            silent_s = process.view.silent_s + min(2.0, TURN_S)
            stopped_s = process.view.stopped_s + TURN_S if process.stopped and process.node else 0.0
            process.view = replace(process.view, silent_s=silent_s, stopped_s=stopped_s)
            return
        poll = RankPoll(
            state=process.state,  # type: ignore[arg-type]
            step=process.step,
            phase="training" if process.state == "running" else "",
            error=process.error,
        )
        process.view = ProcessView(poll=poll, pause=process.result, is_awake=True)

    def answers(self, reply: Reply) -> bool:
        process = self.processes.get(reply.process)
        return process is not None and self.hears(process)

    # ---- what the driver does

    def do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Ask():
                    assert command.group not in self.groups
                    self.groups[command.group] = Group(ask=command)
                case GiveBack():
                    del self.groups[command.group]
                    there = [p for p in self.processes.values() if p.place.group == command.group]
                    assert not there, "the place of a process is given back"
                case StartProcess():
                    self.start(command)
                case EndProcess():
                    process = self.processes.pop(command.process)
                    process.alive = False
                    for world in self.worlds:
                        if process.generation == world.generation:
                            world.members.setdefault(process.number, process)
                    self.pending = [p for p in self.pending if p[1].process != command.process]
                case Call():
                    self.call(command.process, command.call, command.verb)
                case Begin():
                    self.begin(command)
                case Abort():
                    process = self.processes[command.process]
                    same = process.generation == command.generation
                    if same and process.state == "running" and self.hears(process):
                        process.fails_at = self.now
                case Stop():
                    self.processes[command.process].stops = command.going_to
                case Save():
                    self.worlds[-1].saves = True
                case Keep():
                    ranks = [self.processes[s.process or 0] for s in self.run.roster.ranks]
                    assert all(p.result and not p.result.handed_over for p in ranks)
                case Plan():
                    self.plan(command)
                case Tell():
                    self.told.append(command.event)

    def start(self, start: StartProcess) -> None:
        assert start.process not in self.processes
        assert start.place.group in self.groups, "a place that was given back"
        there = [p.place for p in self.processes.values()]
        assert start.place not in there, "two processes at one place"
        born_at = self.now + self.draw.random() * 3
        self.processes[start.process] = Process(
            number=start.process, place=start.place, born_at=born_at
        )
        self.call(start.process, start.call, "describe")

    def call(self, process: int, call: int, verb: Verb) -> None:
        asked = self.processes[process]
        at = self.now + 0.05
        values: dict[str, Any] = {}
        if verb == "describe":
            at = max(at, asked.born_at)
            if self.harms(0.5):
                values["cause"] = f"OSError: at {self.now:.1f}"
        elif verb in ("warm", "take"):
            at = max(at, asked.born_at + 2.0)
            asked.hangs = asked.hangs or self.harms(0.5)
            if asked.hangs:
                at = math.inf
            elif self.harms(2.0):
                values["cause"] = f"ImportError: at {self.now:.1f}"
        elif verb == "store":
            values["value"] = 1000 + call
        self.pending.append((at, Reply(process=process, call=call, verb=verb, **values)))

    def begin(self, begin: Begin) -> None:
        process, seat = self.processes[begin.process], begin.seat
        if not self.worlds or self.worlds[-1].generation != seat.generation:
            running = [p.number for p in self.processes.values() if p.state == "running"]
            assert not running, "nobody may still be in another world"
            first = self.planned_first
            self.worlds.append(World(generation=seat.generation, size=seat.world_size, first=first))
            if first:
                self.planned_first = False
        if seat.rank == 0:
            self.events = []
        world = self.worlds[-1]
        assert seat.world_size == world.size and seat.rank == len(world.members)
        world.members[process.number] = process
        process.state, process.generation, process.step = "running", seat.generation, 0
        process.error, process.stops, process.result = None, None, None
        process.fails_at, process.view = (
            math.inf,
            replace(process.view, poll=None, pause=None, silent_s=0.0, stopped_s=0.0),
        )
        self.call(begin.process, begin.call, "begin")

    def plan(self, plan: Plan) -> None:
        assert isinstance(self.run.state, Planning)
        if not plan.handed_over:
            self.handed_at, self.holders = None, set()
        size = len(plan.processes)
        if self.run.former and not self.run.goes_back and self.harms(20):
            self.unfit.add(size)
        if self.run.former and size in self.unfit:
            self.called_off += 1
            error = PlanError("the tables do not fit")
            self.planned = Planned(refused=str(error), error=error)
            return
        if self.may_stop and self.stops and not plan.handed_over and self.harms(20):
            # the head was silent meanwhile
            self.planned = Planned(given_up=True)
            return
        self.planned_first = plan.handed_over
        self.planned = Planned(has_first=plan.handed_over)


def address(process: Process) -> RankAddress:
    """Return the address of a process."""
    return RankAddress(node_id=process.node, host=f"host-{process.node}", pid=process.number)
