"""Writes docs/configuration.md from the configuration's models, docs/metrics.md from the catalogue of metrics and
docs/run-folder.md from the layout of a run's folder: the pages cannot fall behind the code.

    python docs/generate.py

A test compares the pages with `pages()`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common import catalogue, runfolder
from common.config import Config

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


_RUN_FOLDER = """# The run folder

<!-- Written by docs/generate.py from common/runfolder.py; change that file, then run `make docs`. -->

A run keeps everything in `<run.dir>/<run id>/`, `runs/<run id>/` by default, and nothing else lies there:

{layout}

`config.yaml` and `environment.json` hold no passwords and no environment variables: a password is named by its file,
and logging in to a tracker is left to its own package.

A checkpoint or snapshot is a folder of its own:

| path | what |
|---|---|
| `model/` | the float32 master weights in Hugging Face format, with tokenizer; loads in `transformers` and vLLM |
| `adapter/` | with `learner.lora`, in place of `model/`: the adapter in PEFT's format, float32, with tokenizer |
| `optimizer/`, `rng.safetensors`, `state.json`, with a critic `critic/` | what resuming needs besides |

## Looking at runs

    headrace runs list [DIR]                     one line per run, the one that was written to last first
    headrace runs show RUN [--dir DIR]           configuration where it is not the default, environment, last metrics,
                                                 checkpoints, warnings and errors of the logs
    headrace runs compare RUN... [--metric KEY] [--x step|tokens|wall] [--output report.html]

They read folders only, so they work on runs that are over and on copies. RUN is a folder, or an id in DIR (`runs`).
States are told from the files:

{states}

`compare` draws each `--metric` (by default the reward, the accuracy over all that was sampled, the length of answers
and the entropy) over each `--x`: steps, response tokens trained on, hours of training, those before a resume included.
The file ends with `.png`, or with `.html`: one page with the figures inside, the last values, and where the
configurations differ. It needs matplotlib: `pip install 'headrace[report]'`.

A run that crashed and resumed has some steps twice in `metrics.jsonl`. The later record counts, and takes back
everything that was recorded from its step on. A last line without its end is left out; any other line that is no
record is an error that names file and line.
"""


_METRICS = """# Metrics

<!-- Written by docs/generate.py from common/catalogue.py; change that file, then run `make docs`. -->

One record per policy version, in `metrics.jsonl` (one JSON object a line), and in TensorBoard and other
[trackers](operations.md#experiment-trackers) under `train/`. Shares are
between 0 and 1, log-probabilities and entropies in nats, durations in seconds, ages in policy versions.

    tensorboard --logdir runs/<run>/tensorboard
"""

_EVALUATION = """## Evaluation during training

One record per evaluation, in `eval.jsonl` and in TensorBoard under `eval/` (run `eval`). The step is the policy
version at which the evaluation began.
"""

_PROMETHEUS = """## Prometheus

With `metrics.port` set every process serves `/metrics`, and for probes `/healthz` (it moves) and `/readyz` (it does
what it is there for). `headrace up` gives the broker service the port, and each further process the next one, in the
order in which it names them. In Kubernetes every pod has `metrics.port` for itself. vLLM's own families (`vllm:...`)
stand beside the generator's. Values that are not known are missing, not 0. Alerts on them are in
[alerts.yaml](../k8s/headrace/files/alerts.yaml), each with a [run book](runbooks.md).

Every family has a label `run`, the run's id. The learner serves the latest record, too: `headrace_learner_<key>` for
each key above but `step`, with `_seconds` for `_s`, `_ratio` for `_share` and `_per_second` for `_per_s`;
`staleness_<n>` is the label of `headrace_learner_trained_tokens_total`.
"""


def pages() -> dict[Path, str]:
    """Every page that is written by this script, as Markdown."""
    folder = Path(__file__).parent
    return {
        folder / "configuration.md": configuration(),
        folder / "metrics.md": metrics(),
        folder / "run-folder.md": run_folder(),
    }


def run_folder() -> str:
    rows = [f"| `{name}` | {text} |" for name, text in runfolder.LAYOUT.items()]
    states = [f"| `{name}` | {text} |" for name, text in runfolder.STATES.items()]
    layout = "\n".join(["| path | what |", "|---|---|", *rows])
    return _RUN_FOLDER.format(layout=layout, states="\n".join(["| state | meaning |", "|---|---|", *states]))


def metrics() -> str:
    parts = [_METRICS]
    for title, rows in catalogue.RECORD.items():
        parts += [f"## {title}\n", _meanings(rows)]
    parts += [_EVALUATION, _meanings(catalogue.EVALUATION), _PROMETHEUS]
    served = (
        ("the broker service, of the run", catalogue.RUN),
        ("a generator", catalogue.GENERATOR),
        ("the learner", catalogue.LEARNER),
    )
    for who, families in served:
        rows = [
            f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {each.text} |"
            for each in families
        ]
        head = ["| family | kind | labels | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([f"Served by {who}:\n", *head, *rows, ""]))
    return "\n".join(parts)


def _meanings(rows: Mapping[tuple[str, ...], str]) -> str:
    lines = [f"| {', '.join(f'`{key}`' for key in keys)} | {text} |" for keys, text in rows.items()]
    return "\n".join(["| key | meaning |", "|---|---|", *lines, ""])


def configuration() -> str:
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
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
