"""A learner and some generators in one thread: both state machines are real; registry, streams, link and clock are not.

`World.turn` does what `learner.publisher` and `generator.updates` do with the machines, and checks after every turn
what may never be. Breaking rules is what `World.event` is for: generators come, die, hang, lie, and return.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.weightcontrol import Ack, Commit, Form, Stage, Update
from common.weightwire import Parameter
from generator.standing import Standing
from learner.membership import Identity, Membership, Step

TIMEOUT_S, TTL_S, BEAT_S, TICK_S = 4.0, 2.0, 0.5, 0.5
SLOTS = 4
STEPS = 5  # of an attempt that have a deadline
# What goes wrong at a generator's next commit: it says that it failed, received other bytes (once, always), says a
# wrong checksum, hangs before it has said anything. "unplugged": it answers, but nothing reaches it over the link.
FLAWS = ("nack", "damage", "rot", "lie", "mute", "unplugged")
LASTING = ("rot", "unplugged")
Health = Literal["well", "silent", "frozen", "dead"]  # silent: only its heartbeats go on


def checksum_of(version: int) -> int:
    return 1000 + version


@dataclass
class Player:
    """A generator's process."""

    who: Identity
    standing: Standing
    read: int
    health: Health = "well"
    died_at: float = float("inf")
    beat_at: float = float("-inf")
    holds: int = -1  # what is really in its engine
    received: int | None = None  # checksum of what came over the link
    acknowledged: set[int] = field(default_factory=set)
    said: int | None = None  # checksum in its last "loaded"
    seen: int | None = None  # version of the last commit, of any group
    missed: bool = False  # an update that it was to get was given up
    unsaid: tuple[int, int | None] | None = None  # epoch and checksum of a load it has not acknowledged yet
    flaw: str = ""


class World:
    def __init__(self) -> None:
        self.now, self.version, self.wanted, self.wanted_at = 0.0, -1, False, 0.0
        self.machine = Membership(TIMEOUT_S, lambda: self.now, epoch=0)
        self.players: dict[int, Player] = {}
        self.ghosts: list[Player] = []  # dead processes whose names may be in use again
        self.registry: dict[str, tuple[Identity, str, float]] = {}
        self.control: list[Form | Update | Commit] = []
        self.acks: list[Ack] = []
        self.acks_read = 0
        self.link_fails: Literal["breaks", "hangs", "names"] = "breaks"
        self.job: tuple[Step, float] | None = None
        self.link: int | None = None  # its epoch
        self.step, self.step_at = Step.REST, 0.0
        self.despaired = False
        self._pids = 0

    # --- what happens to them

    def event(self, kind: str, slot: int) -> None:
        player = self.players.get(slot)
        if kind == "publish":
            self.wanted, self.wanted_at = True, self.now if not self.wanted else self.wanted_at
        elif kind in ("breaks", "hangs", "names"):
            self.link_fails = kind  # type: ignore[assignment]
        elif kind == "pass":
            for _ in range(1 + slot * 6):
                self.turn()
        elif kind == "join" and player is None:
            self._start(slot)
        elif kind == "restart" and player is not None:  # at once, under the same name
            self._die(slot)
            self._start(slot)
        elif player is None:
            return
        elif kind == "die":
            self._die(slot)
        elif kind == "leave":
            player.standing.drain()
            self._beat(player)
            self._die(slot)
            del self.registry[player.who[0]]
        elif kind in ("silent", "frozen"):
            player.health = kind  # type: ignore[assignment]
        elif kind == "wake":
            player.health = "well"
        elif kind in FLAWS:
            player.flaw = kind

    def _start(self, slot: int) -> None:
        self._pids += 1
        name = f"g{slot}"
        self.players[slot] = Player((name, "host", self._pids), Standing(name), len(self.control))
        self.players[slot].standing.follow()

    def _die(self, slot: int) -> None:
        player = self.players.pop(slot)
        player.health, player.died_at = "dead", self.now
        self.ghosts.append(player)

    # --- a moment

    def turn(self) -> None:
        self.now += TICK_S
        for slot, player in list(self.players.items()):
            if player.health != "frozen" and self.now - player.beat_at >= BEAT_S:
                self._beat(player)
            if player.health == "well":
                self._follow(slot, player)
        self._publisher()
        self._check()

    def _beat(self, player: Player) -> None:
        player.beat_at = self.now
        self.registry[player.who[0]] = (player.who, player.standing.state, self.now)

    def _publisher(self) -> None:
        """One turn of `WeightPublisher`, and of the learner that wants to publish."""
        machine = self.machine
        machine.next_waits = self.wanted
        machine.look(
            who for who, state, at in self.registry.values()
            if self.now - at <= TTL_S and state in ("syncing", "serving")
        )  # fmt: skip
        self._link()
        for ack in self.acks[self.acks_read :]:
            machine.acknowledged(ack)
        self.acks_read = len(self.acks)
        step = machine.step()
        if step is not Step.WAIT:
            self.step, self.step_at = step, self.now
        self.despaired |= step is Step.DESPAIR
        if step in (Step.CONNECT, Step.UPDATE, Step.SEND, Step.COMMIT):
            assert self.link == machine.epoch, f"{step} in group {machine.epoch}, the link is of {self.link}"
        if step is Step.FORM:
            self.link = machine.epoch
            ranks = {name: rank for rank, name in enumerate(machine.members, 1)}
            self.control.append(Form(machine.epoch, "gloo", "host", 1, len(ranks) + 1, ranks, 1, TIMEOUT_S))
        elif step in (Step.CONNECT, Step.SEND):
            self.job = (step, self.now)
        elif step is Step.UPDATE:
            self.control.append(Update(machine.epoch, machine.version, (Parameter("w", "float32", (1,)),)))
        elif step is Step.COMMIT:
            self.control.append(Commit(machine.epoch, machine.version, machine.checksum))
            members = [player for player in self.players.values() if player.who in machine.members.values()]
            assert all(player.received is not None for player in members), "committed before all had everything"
        elif step is Step.LOADED:
            living = {player.who: player for player in self.players.values()}
            for who in machine.members.values():
                said = living[who].said if who in living else machine.checksum
                assert said == machine.checksum, f"{who} counts as served, but said {said}"
        elif step is Step.DISBAND:
            self.job = self.link = None
        elif step in (Step.REST, Step.DESPAIR) and machine.complete and self.wanted:
            self.version, self.wanted = self.version + 1, False
            machine.publish(self.version, checksum_of(self.version))

    def _link(self) -> None:
        if self.job is None:
            return
        step, since = self.job
        here = {
            player.who: player for player in self.players.values()
            if player.health == "well" and player.flaw != "unplugged" and player.standing.epoch == self.link
            and (step is Step.CONNECT or player.standing.staged == self.machine.version)
        }  # fmt: skip
        missing = [name for name, who in self.machine.members.items() if who not in here]
        if not missing:
            self.job = None
            if step is Step.SEND:
                for who in self.machine.members.values():
                    here[who].received = checksum_of(self.machine.version) + (here[who].flaw in ("damage", "rot"))
            self.machine.link_done()
        elif self.link_fails == "breaks" or (self.link_fails == "names" and self.now - since > TIMEOUT_S / 2):
            self.job = None
            self.machine.link_done("broken pipe", missing if self.link_fails == "names" else ())

    def _follow(self, slot: int, player: Player) -> None:
        """What `generator.updates` does with the control stream."""
        standing = player.standing
        self._loaded(player)  # where it had stopped before
        for message in self.control[player.read :]:
            player.read += 1
            if isinstance(message, Commit):
                player.seen = message.version
            if isinstance(message, Form):
                player.missed |= standing.staged is not None
            if isinstance(message, Form) and standing.formed(message):
                self._say(player, "formed", message.epoch, standing.version)
            elif isinstance(message, Update) and standing.announced(message):
                player.received = None
                self._say(player, "receiving", message.epoch, message.version)
            elif isinstance(message, Commit) and standing.committed(message):
                flaw, player.flaw = player.flaw, player.flaw if player.flaw in LASTING else ""
                if flaw == "nack":
                    self._say(player, "failed", message.epoch, message.version)
                    self._die(slot)
                    return
                if player.received != message.checksum:
                    self._say(player, "corrupt", message.epoch, message.version, player.received)
                    standing.corrupt()
                    continue
                player.holds = message.version
                player.unsaid = (message.epoch, 7 if flaw == "lie" else player.received)
                if flaw == "mute":
                    player.health = "silent"
                    return
                self._loaded(player)

    def _loaded(self, player: Player) -> None:
        if player.unsaid is not None and player.standing.staged is not None:
            (epoch, checksum), player.unsaid = player.unsaid, None
            self._say(player, "loaded", epoch, player.standing.staged, checksum)
            player.said, player.missed = checksum, False
            player.standing.loaded()

    def _say(self, player: Player, stage: Stage, epoch: int, version: int, checksum: int | None = None) -> None:
        self.acks.append(Ack(player.who[0], epoch, version, stage, checksum=checksum))
        if stage == "loaded":
            player.acknowledged.add(version)

    # --- what has to hold

    def _check(self) -> None:
        for player in self.players.values():
            if player.standing.state == "serving" and player.health == "well":
                version = player.standing.version
                assert version in player.acknowledged, f"{player.who} serves {version}, which it did not acknowledge"
                assert version == player.holds, f"{player.who} stamps {version} and holds {player.holds}"
                assert not player.missed, f"{player.who} serves after it has missed an update"
                assert version == player.seen, f"{player.who} serves {version} and has seen {player.seen} go out"
        if self.step in (Step.REST, Step.LOADED, Step.DISBAND, Step.DESPAIR):
            return
        assert self.now - self.step_at <= TIMEOUT_S + TICK_S, f"{self.step} has no end"
        kept_s = self.now - max(self.step_at, self.wanted_at)
        idle = self.wanted and self.machine.complete and self.step is Step.FORM
        assert not idle or kept_s <= 2 * TICK_S, "newcomers that do not answer keep the learner waiting"
        members = set(self.machine.members.values())
        for ghost in self.ghosts:
            if ghost.who in members and self.machine.version not in ghost.acknowledged:
                assert self.now - ghost.died_at <= TTL_S + 2 * TICK_S, f"{ghost.who} is dead, its group not"

    # --- the end

    def settle(self) -> None:
        """Nothing happens any more: what was published is delivered, and whoever is well gets it."""
        self._turn_until(lambda: self.machine.complete and not self.wanted, (SLOTS + 3) * STEPS * TIMEOUT_S)
        if self.despaired:
            return
        for slot in [slot for slot, player in self.players.items() if player.health != "well"]:
            self._die(slot)
        for player in self.players.values():
            player.flaw = ""
        if self.version >= 0:
            longest = (2**5 + STEPS) * TIMEOUT_S  # left out, and then served
            self._turn_until(
                lambda: all(
                    (player.standing.state, player.standing.version) == ("serving", self.version)
                    for player in self.players.values()
                ),
                TTL_S + SLOTS * longest,
            )

    def _turn_until(self, condition: object, seconds: float) -> None:
        end = self.now + seconds
        while not condition():  # type: ignore[operator]
            assert self.now < end, f"no end in {seconds} s: {self.machine.reason}; {self.step}"
            self.turn()
