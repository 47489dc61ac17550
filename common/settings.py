"""Reading a configuration: the YAML file, then `HEADRACE__SECTION__FIELD` variables, then overrides in their order.

An override is a dotted field, or an overlay: a YAML file that holds some of the sections.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.config import Config
from common.errors import ConfigError

ENV_PREFIX = "HEADRACE__"


def load(path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """The resolved configuration.

    Args:
        path: the run's YAML file.
        overrides: `section.field=value`, the value in YAML, or the path of an overlay (.yaml or .yml); a later one wins
            over an earlier one, all win over variables, and variables over the file.
        environ: defaults to the process's environment.

    Raises:
        ConfigError: one line per mistake, each with the field, the value and what would be right.
    """
    return resolve(read(path), str(path), overrides, environ)


def resolve(
    tree: dict[str, Any], where: str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Config:
    """As `load`, from a tree of sections that came from `where`; the tree is changed."""
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            _assign(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), value, name)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator and key.endswith((".yaml", ".yml")):
            _lay_over(tree, read(Path(key)))
            continue
        if not separator or not key:
            raise ConfigError(
                f"override {override!r}: expected section.field=value, for example learner.max_steps=20, or the path "
                "of an overlay (.yaml)"
            )
        _assign(tree, key.split("."), value, f"override {override!r}")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = dict.fromkeys(f"{where}: {_explain(detail)}" for detail in error.errors())
        raise ConfigError("\n".join(lines)) from None


def read(path: Path) -> dict[str, Any]:
    """A YAML file's top level. Raises ConfigError where it cannot be read or holds no mapping."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a run's YAML file, for example examples/tiny.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds a {type(tree).__name__}; expected sections such as run, model and prompts")
    return tree


def _lay_over(tree: dict[str, Any], overlay: Mapping[str, Any]) -> None:
    """Put the overlay's values into `tree`, section by section; a section of another `type` replaces the old one."""
    for key, value in overlay.items():
        below = tree.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and value.get("type") in (None, below.get("type")):
            _lay_over(below, value)
        else:
            tree[key] = value


def _assign(tree: dict[str, Any], keys: list[str], text: str, where: str) -> None:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{where}: the value is not valid YAML") from None
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{where}: {key!r} is {child!r}, not a section")
        node = child
    node[keys[-1]] = value


def _explain(detail: ErrorDetails) -> str:
    parts = list(detail["loc"])
    # Behind a choice pydantic puts the chosen member's tag into the location; it is not part of the field's name.
    for index in (2, 1):
        if len(parts) > index and parts[index - 1] in ("prompts", "reward"):
            del parts[index]
            break
    field = ".".join(str(part) for part in parts) or "configuration"
    message, value = detail["msg"].removeprefix("Value error, "), detail["input"]
    if detail["type"] == "extra_forbidden":
        return f"{field}: unknown key (value {value!r:.60}); `headrace config schema` lists the known ones"
    if detail["type"] == "missing":
        return f"{field}: missing, and it has no default"
    if field == "configuration":
        return message
    if isinstance(value, dict) or field == "broker.url":  # a refused URL may hold a password
        return f"{field}: {message}"
    return f"{field}: {message} (value {value!r:.60})"


def check(config: Config) -> None:
    """Run every room's start-up checks: what the schema cannot see, before any process takes a GPU.

    Raises:
        ConfigError: from the first check that finds a mistake.
    """
    for point in sorted(entry_points(group="headrace.checks"), key=lambda point: point.name):
        point.load()(config)
