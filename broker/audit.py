"""Reading a run from outside: its ledger as the conservation equation, its queues, its members.

A run that is over is read too: where no server answers, one is started on the data the run left in its folder.

The equation counts releases. A prompt whose group expires is released again in the same step: it adds one to `expired`
and one to `released`, and stays outstanding, so the equation holds at every moment and the release budget, which is
measured from the streams, counts the prompt all along. How often prompts expired is printed beside it: no prompt goes
round for ever unseen. A dead letter that is put back moves from `dead` to `outstanding`; one that is dropped stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from broker.clients import Endpoint, endpoint
from broker.records import DeadLetter, EvalState, Ledger, Member, Queues, Unfinished
from broker.server import Server
from broker.store import Broker
from common.config import Config
from common.errors import ConfigError


@contextmanager
def open_run(config: Config) -> Iterator[Broker]:
    """The run's broker: the live server, else one started for the occasion on the run folder's data.

    Raises:
        ConfigError: neither.
    """
    try:
        broker = Broker.connect(config, endpoint(config), reader=True)
    except ConfigError:
        if config.broker.address or not (config.run.folder / "redis" / "appendonlydir").is_dir():
            raise
    else:
        try:
            yield broker
        finally:
            broker.close()
        return
    # Read-only company: the port `up` used is not needed.
    with Server(config.broker.model_copy(update={"port": None})).start(config.run.folder) as server:
        broker = Broker.connect(config, Endpoint(server.url, server.password))
        try:
            yield broker
        finally:
            broker.close()


def equation(ledger: Ledger) -> str:
    """The conservation equation, a line for each term."""
    terms = [
        ("released", ledger.released),
        ("= trained", ledger.trained),
        ("+ filtered, all correct", ledger.filtered_correct),
        ("+ filtered, all wrong", ledger.filtered_wrong),
        ("+ filtered, equal rewards", ledger.filtered_equal),
        ("+ expired", ledger.expired),
        ("+ dead-lettered", ledger.dead),
        ("+ outstanding", ledger.outstanding),
    ]
    if ledger.balanced:
        verdict = "balanced"
    else:
        verdict = f"NOT BALANCED: released is {ledger.released}, the terms sum to {ledger.accounted}"
    extra = (
        f"({ledger.submitted} submitted, {ledger.settled} settled, {ledger.rereleased} released again, "
        f"{ledger.duplicates} duplicates discarded)"
    )
    return "\n".join([*(f"{name:<27}{value:>10}" for name, value in terms), extra, verdict])


def oldest(unfinished: Unfinished) -> str:
    """What waits longest and where, and which prompts come back again and again."""
    lines = [f"oldest outstanding group: {unfinished.outstanding or 'none'}"]
    if unfinished.unsettled is not None:
        lines.append(f"oldest unsettled group: {unfinished.unsettled}")
    if unfinished.expiries:
        worst = max(unfinished.expiries, key=lambda group_id: unfinished.expiries[group_id])
        lines.append(
            f"expired before and not ended yet: {len(unfinished.expiries)} groups, "
            f"{worst} most often ({unfinished.expiries[worst]} times)"
        )
    return "\n".join(lines)


def report(run: Broker) -> tuple[str, bool]:
    """What `headrace audit` prints, and whether the ledger balances."""
    ledger = run.ledger()
    return f"run {run.config.run.run_id}\n{oldest(run.unfinished())}\n\n{equation(ledger)}", ledger.balanced


def watch(run: Broker, console: Console, pause: Callable[[], None]) -> bool:
    """Show `report` anew after every `pause`, until a KeyboardInterrupt; what was shown last stays.

    Returns:
        Whether the ledger balanced the last time.
    """
    text, balanced = report(run)
    with Live(Text(text), console=console, auto_refresh=False) as live:
        try:
            while True:
                pause()
                text, balanced = report(run)
                live.update(Text(text), refresh=True)
        except KeyboardInterrupt:
            return balanced


def overview(
    run_id: str,
    version: int,
    queues: Queues,
    ledger: Ledger,
    members: list[Member],
    dead: list[DeadLetter],
    evaluation: EvalState,
) -> str:
    """What `headrace status` prints."""
    lines = [
        f"run {run_id}, policy version {version}",
        f"prompts   {queues.prompts_waiting} waiting, {queues.prompts_leased} leased",
        f"groups    {queues.groups_waiting} waiting, {queues.groups_held} held by the learner, "
        f"{queues.unsettled} trained and not yet in a checkpoint",
        *(str(each) for each in (evaluation.result, evaluation.open) if each is not None),
        "",
        equation(ledger),
        "",
        f"members   {len(members)}",
    ]
    for member in members:
        counters = " ".join(f"{name}={value:g}" for name, value in sorted(member.counters.items()))
        lines.append(
            f"  {member.id} {member.role} {member.state} v={member.version} epoch={member.epoch} "
            f"{member.host}:{member.pid} seen {member.age_s:.1f} s ago {counters}".rstrip()
        )
    if queues.dead_letters:
        lines += ["", f"dead letters {queues.dead_letters}, the newest:"]
        lines += [f"  {each.id}: {each.error}" for each in dead]
    return "\n".join(lines)
