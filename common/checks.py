"""Start-up checks of what every room uses: the packages that trackers and traces need."""

from __future__ import annotations

import importlib.util
import os

from common.config import Config, TrackingConfig
from common.errors import ConfigError

MLFLOW_URI = "MLFLOW_TRACKING_URI"
_TRACKIO_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


def check(config: Config) -> None:
    """Raises ConfigError where a tracker, or what sends traces, cannot be used here."""
    _check_trackers(config.tracking)
    if config.tracing.endpoint is not None and importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError(
            f"tracing.endpoint: {config.tracing.endpoint!r} needs a package that is not installed; "
            "run: pip install 'headrace[tracing]'"
        )


def _check_trackers(tracking: TrackingConfig) -> None:
    for name in tracking.trackers:
        if importlib.util.find_spec(name) is None:
            how = f"run: pip install 'headrace[{name}]'" if name != "tensorboard" else "run: pip install tensorboard"
            raise ConfigError(f"tracking.trackers: {name!r} needs a package that is not installed; {how}")
    if "mlflow" in tracking.trackers and not tracking.offline and not os.environ.get(MLFLOW_URI):
        raise ConfigError(
            f"tracking.trackers: 'mlflow' needs a server; set {MLFLOW_URI}, or tracking.offline to true for a database "
            "in the run's folder"
        )
    for variable in _TRACKIO_REMOTE if "trackio" in tracking.trackers and tracking.offline else ():
        if os.environ.get(variable):
            raise ConfigError(f"tracking.offline: true, but {variable} is set, where trackio would send; unset it")
