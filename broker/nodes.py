"""Which nodes of an elastic learner `headrace up` has and wants."""

from __future__ import annotations

from collections.abc import Sequence

from broker.processes import METRICS_VARIABLE, Child, Command
from broker.reading import Reading
from broker.store import Broker
from common.config import Config


class Nodes:
    """The nodes of the learner on this machine.

    Args:
        config: the run; `learner.elastic` is set.
        ranks: how many to begin with; None: as last wished for, else the least.
        commands: of which the learner's is every node's.

    Attributes:
        present: those that are wanted, in the order in which they were started; one that ended by itself is among them.
    """

    def __init__(self, config: Config, ranks: int | None, commands: Sequence[Command]) -> None:
        assert config.learner.elastic is not None
        self._elastic, self._each = config.learner.elastic, config.learner.ranks
        self._ranks = ranks
        self._command = next(command for command in commands if command.role == "learner")
        self.present: list[Child] = []
        self._dismissed: list[Child] = []
        self._lost, self._durable = 0, -1

    def first_wish(self, broker: Broker) -> int:
        """How many ranks there are to be at first, which is a wish from now on."""
        ranks = self._ranks or broker.wished_ranks() or self._elastic.min_nodes * self._each
        broker.resize(ranks)
        return ranks

    def surplus(self, ranks: int | None) -> list[Child]:
        """Nodes to dismiss now for `ranks` ranks (None: as many as there are), the youngest first."""
        if ranks is None:
            return []
        gone = self.present[ranks // self._each :][::-1]
        self._dismissed += gone
        self.present = [child for child in self.present if child not in gone]
        return gone

    def missing(self, ranks: int | None) -> list[Command]:
        """Nodes to start now for `ranks` ranks. None once one has ended by itself: the run is over."""
        if ranks is None or any(child.exit_code is not None for child in self.present):
            return []
        taken = {child.name for child in (*self.present, *self._dismissed) if child.exit_code is None}
        names = (name for number in range(1000) if (name := f"learner-{number}") not in taken)
        command = self._command
        wanted = [next(names) for _ in range(ranks // self._each - len(self.present))]
        return [Command(name, command.role, command.argv, self._environ(name)) for name in wanted]

    def _environ(self, name: str) -> dict[str, str]:
        """A port of its own for every node, from that of the one command on."""
        environ = dict(self._command.environ)
        if METRICS_VARIABLE in environ:
            environ[METRICS_VARIABLE] = str(int(environ[METRICS_VARIABLE]) + int(name.rpartition("-")[2]))
        return environ

    def started(self, child: Child) -> None:
        self.present.append(child)

    def replaces(self, child: Child, code: int, reading: Reading | None) -> bool:
        """Whether the run goes on without `child`, which ended with `code`: it was dismissed, or it was killed, and
        nodes were not killed too often without anything becoming durable in between."""
        if child in self._dismissed:
            return True
        if child not in self.present or code > 0:
            return False
        durable = reading.ledger.settled if reading is not None else -1
        self._lost = self._lost + 1 if durable == self._durable else 1
        self._durable = durable
        self.present.remove(child)
        return self._lost <= self._elastic.max_failures
