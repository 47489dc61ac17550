"""Writes docs/configuration.md from the configuration's models, so that the page cannot fall behind them.

    python docs/generate.py

A test compares the page with `page()`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.config import Config

PAGE = Path(__file__).with_name("configuration.md")

_OPENING = """# Configuration

<!-- Written by docs/generate.py from common/config.py; change that file, then run `make docs`. -->

One YAML file describes a run, and every process of the run reads the same file. Values come from, later ones winning:

1. the defaults below;
2. the file;
3. environment variables `HEADRACE__SECTION__FIELD`, for example `HEADRACE__LEARNER__MAX_STEPS=20`;
4. `--set section.field=value` on the command line, which may be given several times.

Values in 3 and 4 are YAML: `--set objective.dual_clip=null`, `--set sampling.dynamic_sampling=false`. Lists are written
`[0.5, 2.0]`, sections may be nested: `--set objective.correction.mode=bypass`.

An unknown key, an impossible value or an impossible combination ends the command with one line that names the field,
the value and what would be right.

    headrace config check CONFIG    does it fit, and does everything it points to exist?
    headrace config show CONFIG     the file as resolved, with every default
    headrace config schema          the JSON schema, for an editor

The sections `run`, `model`, `prompts` and `reward` are required; "required" in the tables marks fields without a
default.
"""


def page() -> str:
    """The whole page as Markdown."""
    schema = Config.model_json_schema()
    sections = [_OPENING]
    for name, field in schema["properties"].items():
        sections += _sections(name, field, schema["$defs"])
    return "\n".join(sections)


def _sections(name: str, field: dict[str, Any], models: dict[str, Any]) -> Iterator[str]:
    """A heading and a table for each model a field may hold, then those of the sections within it."""
    for model_name, model in _models(field, models):
        choice = model["properties"].get("type", {})
        values = [choice["const"]] if "const" in choice else choice.get("enum", [])
        of_type = f", type {' or '.join(f'`{value}`' for value in values)}" if values else ""
        optional = "Optional section. " if field.get("default", {}) is None else ""
        yield f"## `{name}`{of_type}\n\n{optional}{_flat(model.get('description', model_name))}\n"
        rows, inner = [], []
        for key, value in sorted(model["properties"].items(), key=lambda item: item[0] != "type"):
            if any(True for _ in _models(value, models)):
                inner.append((f"{name}.{key}", value))
                continue
            # A default made by a factory is not in the schema; the only such fields are empty mappings.
            default = f"`{json.dumps(value['default'])}`" if "default" in value else "`{}`"
            if key in model.get("required", ()):
                default = "required"
            rows.append(f"| `{key}` | {_kind(value)} | {default} | {_flat(value.get('description', ''))} |")
        yield "\n".join(["| field | value | default | meaning |", "|---|---|---|---|", *rows, ""])
        for inner_name, value in inner:
            if inner_name == "eval.prompts":
                yield f"## `{inner_name}`\n\nRequired; as [`prompts`](#prompts-type-reasoning_gym).\n"
            else:
                yield from _sections(inner_name, value, models)


def _models(field: dict[str, Any], models: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for option in [field, *field.get("oneOf", []), *field.get("anyOf", [])]:
        if "$ref" in option:
            name = option["$ref"].rsplit("/", 1)[-1]
            yield name, models[name]


def _kind(field: dict[str, Any]) -> str:
    """What values a plain field takes, in words."""
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "prefixItems" in field:
        return f"list of {len(field['prefixItems'])} {field['prefixItems'][0]['type']}s"
    name = {"object": "mapping", "string": "path" if field.get("format") == "path" else "string"}.get(
        field["type"], field["type"]
    )
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    return " ".join([name, ", ".join(f"{sign} {field[key]}" for key, sign in signs.items() if key in field)]).strip()


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
