"""`headrace autoscale`: what the learner needs, and with --apply a workload that is scaled to it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from common import log as logs
from common import settings
from common.cli import ConfigPath, Overrides
from common.errors import ConfigError
from common.log import Logger

if TYPE_CHECKING:
    from broker.autoscale import Autoscaler, Wish
    from broker.scaling import KubernetesScale, Pace
    from broker.store import Broker


def autoscale(
    config: ConfigPath,
    every: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Time between two looks.")] = 15.0,
    apply: Annotated[
        str | None, typer.Option("--apply", metavar="NAME", help="Scale this workload of this cluster to the wish.")
    ] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")] = "default",
    kind: Annotated[str, typer.Option("--kind", help="Deployment or LeaderWorkerSet.")] = "Deployment",
    overrides: Overrides = None,
) -> None:
    """Say how many generators the learner needs (within the section `autoscale`), whenever that changes, until stopped;
    with --apply, make it so."""
    from broker.autoscale import Autoscaler
    from broker.scaling import KubernetesScale, Pace
    from broker.service import stop_signal
    from broker.store import Broker

    resolved = settings.load(config, overrides or [])
    if kind not in ("Deployment", "LeaderWorkerSet"):
        raise ConfigError(f"--kind: is {kind!r}; expected Deployment or LeaderWorkerSet")
    scale = None if apply is None else KubernetesScale.of_this_cluster(namespace, apply, kind)  # type: ignore[arg-type]
    log = logs.setup(resolved.run.run_id, "autoscaler")
    broker = Broker.connect(resolved, reader=True)
    try:
        limits = resolved.autoscale
        start = scale.read() if scale is not None else len(broker.members("generator"))
        scaler = Autoscaler(limits, resolved.learner.groups_per_step, start)
        with stop_signal(None) as stop:
            follow(broker, scaler, Pace(limits.min, limits.max), scale, log, stop, every)
    finally:
        broker.close()


def follow(
    broker: Broker,
    scaler: Autoscaler,
    pace: Pace,
    scale: KubernetesScale | None,
    log: Logger,
    stop: threading.Event,
    every_s: float,
) -> None:
    """Look every `every_s` seconds until `stop`; an API server that does not answer is asked again at the next look."""
    from broker.hunger import observe
    from broker.scaling import ScaleError

    said: Wish | None = None
    while not stop.is_set():
        wish = scaler.observe(observe(broker.config, broker.members(), broker.queues(), time.monotonic()))
        if said is None or said.generators != wish.generators:
            log.info("%d generators wanted: %s", wish.generators, _reason(wish))
            said = wish
        if scale is not None:
            try:
                pods = scale.read()
                target = pace.step(time.monotonic(), pods, wish.generators)
                if target != pods:
                    scale.write(target)
                    log.info("%s scaled from %d to %d", scale.name, pods, target)
            except ScaleError as error:
                log.warning("%s; trying again in %g s", error, every_s)
        stop.wait(every_s)


def _reason(wish: Wish) -> str:
    if wish.base is None or wish.trim is None:
        return "nothing is known yet of the learner's steps or the generators' rate"
    return f"base {wish.base:.2f}, trim {wish.trim:+.2f}, starved {wish.starved:.1%}{', held' if wish.held else ''}"
