"""Reading data sets of prompts: files and folders, the `prompt`-column convention and the DAPO schema.

Promises: nothing is converted silently. A row whose prompt cannot be used is named with its number; the DAPO schema's
`reward_model.ground_truth` becomes the column `ground_truth`; every further column is handed on under its own name, as
plain values that msgpack can carry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.config import DatasetPrompts
from common.errors import ConfigError
from common.trajectory import TRUTH_COLUMNS, find_truth

_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
_INT64, _UINT64 = -(2**63), 2**64


def plain(value: Any) -> Any:
    """`value` as None, bool, int, float, str, bytes, list or dict with string keys; other kinds become their text.

    Integers that do not fit 64 bits become decimal strings, since msgpack cannot carry them.
    """
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return value
    if isinstance(value, int):
        return int(value) if _INT64 <= value < _UINT64 else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return plain(value.tolist())
    return str(value)


def looks_like_path(path: str) -> bool:
    """Whether `path` can only be meant as a place on this machine, not as a hub name (`name` or `owner/name`)."""
    parts = path.split("/")
    return path.startswith((".", "/", "~")) or len(parts) > 2 or not all(parts) or (
        len(parts) == 2 and Path(parts[0]).is_dir()
    )


def columns_of(prompts: DatasetPrompts) -> list[str]:
    """The column names, read without loading the data.

    Raises:
        ConfigError: the file or folder is not there or cannot be read.
    """
    path = Path(prompts.path).expanduser()
    try:
        if path.suffix == ".parquet" and path.is_file():
            from pyarrow import parquet  # type: ignore[import-untyped]

            return list(parquet.read_schema(path).names)
        if path.suffix in (".jsonl", ".json") and path.is_file():
            return _json_columns(path)
        return list(load(prompts).column_names)
    except ConfigError:
        raise
    except Exception as error:  # every reader has errors of its own; all mean that the file is not what it should be
        raise ConfigError(f"prompts.path: {prompts.path!r} cannot be read: {' '.join(str(error).split())}") from error


def _json_columns(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), "")
        if first.lstrip().startswith("["):
            file.seek(0)
            rows = json.load(file)
            row = rows[0] if rows else None
        else:
            row = json.loads(first) if first else None
    if not isinstance(row, dict):
        raise ConfigError(f"prompts.path: {str(path)!r} holds no rows; expected one JSON object per line")
    return list(row)


def load(prompts: DatasetPrompts) -> Any:
    """The `datasets.Dataset` that `prompts` names.

    Raises:
        ConfigError: no such file, folder, hub data set or split, or it cannot be read.
    """
    path = Path(prompts.path).expanduser()
    kind = _FORMATS.get(path.suffix)
    if not path.exists() and (kind or looks_like_path(prompts.path)):
        raise ConfigError(
            f"prompts.path: no such file or folder: {prompts.path!r}; expected a .parquet, .jsonl or .json file, a "
            "data-set folder or a hub name"
        )
    import datasets

    datasets.disable_progress_bars()
    try:
        if kind is not None:
            return datasets.load_dataset(kind, data_files={prompts.split: str(path)}, split=prompts.split)
        if (path / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(path))
            if prompts.split not in splits:
                raise ConfigError(f"prompts.split: {prompts.split!r} is not in {prompts.path!r}; it has {list(splits)}")
            return splits[prompts.split]
        if (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(str(path) if path.is_dir() else prompts.path, split=prompts.split)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        where = f"{prompts.path!r} (split {prompts.split!r})"
        raise ConfigError(f"prompts.path: {where} cannot be read: {reason}") from error


def require_column(prompts: DatasetPrompts, columns: list[str], field: str = "prompts.prompt_column") -> None:
    if prompts.prompt_column not in columns:
        raise ConfigError(
            f"{field}: {prompts.path!r} has no column {prompts.prompt_column!r}; it has {', '.join(columns)}"
        )


def prompt_key(value: Any, row: int, column: str) -> str:
    """The text of a prompt, by which duplicates are found: the string itself, or roles and contents of the messages.

    Raises:
        ConfigError: not a non-empty string nor a non-empty list of {role, content}; names the row.
    """
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    ):
        return "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in value)
    raise ConfigError(
        f"prompts.prompt_column: row {row} of column {column!r} is {value!r:.80}; expected a non-empty string or a "
        "list of messages with role and content"
    )


def unique_rows(data: Any, prompts: DatasetPrompts) -> tuple[list[int], list[str]]:
    """Row numbers to use: all of them, or the first of each prompt text where `deduplicate` is on.

    The second list has one text per dropped row whose right answer is not that of the row that was kept.
    """
    seen: dict[str, tuple[int, str | None]] = {}
    rows, conflicts = [], []
    for row, columns in _prompts_and_truths(data, prompts.prompt_column):
        key = prompt_key(columns[prompts.prompt_column], row, prompts.prompt_column)
        if prompts.deduplicate:
            truth = find_truth(_with_truth(columns))
            first, expected = seen.setdefault(key, (row, truth))
            if first != row:
                if truth != expected:
                    conflicts.append(f"rows {first} and {row} ({expected!r:.40} and {truth!r:.40})")
                continue
        rows.append(row)
    return rows, conflicts


def _prompts_and_truths(data: Any, prompt_column: str, batch: int = 4096) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row, its prompt and the columns that may hold the right answer) of every row; no other column is read."""
    names = [name for name in data.column_names if name in (prompt_column, *TRUTH_COLUMNS, "reward_model")]
    only = data.select_columns(names)
    for start in range(0, len(only), batch):
        block = only[start : start + batch]
        for offset, values in enumerate(zip(*(block[name] for name in names), strict=True)):
            yield start + offset, dict(zip(names, values, strict=True))


def _with_truth(columns: dict[str, Any]) -> dict[str, Any]:
    """`columns` with `ground_truth` out of the DAPO schema's `reward_model`, unless it is there already."""
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        columns.setdefault("ground_truth", reward_model["ground_truth"])
    return columns


def columns_from_row(row: Mapping[str, Any], prompt_column: str) -> dict[str, Any]:
    """What the reward gets: every further column, and `ground_truth` out of the DAPO schema's `reward_model`."""
    return _with_truth({name: plain(value) for name, value in row.items() if name != prompt_column})
