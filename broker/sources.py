"""Where prompts come from: procedurally generated tasks and data sets, rendered and tokenised.

A source is an endless sequence: position -> prompt, the same one whenever it is asked, in a new order on every pass
over the data (a permutation drawn from the run's seed and the pass's number, so that a restart needs only a position).
Prompts longer than `sampling.max_prompt_tokens` never come out, nor, in training, those of the `eval` section; how many
were left out, and how many rows were duplicates, is logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from broker import datafiles
from common.config import Config, DatasetPrompts, PromptsConfig, ReasoningGymPrompts
from common.errors import ConfigError
from common.log import Logger
from common.trajectory import Int32Array

_TOKENISER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class Sourced:
    """One prompt: its tokens, the exact text they stand for, and the columns that go to the reward."""

    token_ids: Int32Array
    text: str
    columns: dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """What became of a source's rows: `merged` repeated an earlier prompt, `left_out` are prompts that are too long or
    held out. The rest are the prompts of one pass."""

    rows: int
    merged: int = 0
    left_out: int = 0


class Source(Protocol):
    """An endless sequence of prompts; `len` is the number of prompts in one pass."""

    counts: Counts

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Sourced: ...


class _Order:
    """position -> index into n items, in a new order on every pass. Holds one permutation at a time."""

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._cached: tuple[int, np.ndarray[Any, Any]] | None = None

    def __call__(self, position: int) -> int:
        if position < 0:
            raise IndexError(f"prompt position {position}; expected >= 0")
        number, offset = divmod(position, self._count)
        if not self._shuffle:
            return offset
        cached = self._cached  # read once: other threads may replace it
        if cached is None or cached[0] != number:
            cached = (number, np.random.default_rng([self._seed, number]).permutation(self._count))
            self._cached = cached
        return int(cached[1][offset])


class PromptEncoder:
    """Turns a prompt (plain string or messages) into text and tokens, with the model's tokenizer and chat template."""

    def __init__(self, prompts: PromptsConfig, config: Config, tokenizer: Any) -> None:
        self._system, self._suffix = prompts.system, prompts.suffix
        self._template, self._tokenizer = config.model.chat_template, tokenizer
        if self._template and isinstance(prompts, ReasoningGymPrompts):
            self.require_template()

    def require_template(self) -> None:
        if self._template and not self._tokenizer.chat_template:
            raise ConfigError(
                f"model.chat_template: the tokenizer of {self._tokenizer.name_or_path!r} has no chat template; set "
                "model.chat_template to false, or give prompts as plain text"
            )

    def text(self, prompt: str | Sequence[dict[str, str]]) -> str:
        """The text that the model sees. A string is taken as it is; messages go through the chat template."""
        if isinstance(prompt, str):
            return prompt + self._suffix
        messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
        messages[-1]["content"] += self._suffix
        if self._system is not None:
            kept = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": self._system}, *kept]
        if not self._template:
            return "\n\n".join(m["content"] for m in messages if m["content"])
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def tokens(self, text: str, plain: bool) -> Int32Array:
        """Token ids of `text`. Plain text gets the tokenizer's own special tokens; a template brings its own."""
        ids = self._tokenizer(text, add_special_tokens=plain or not self._template)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def lengths(self, texts: list[str], plain: list[bool]) -> list[int]:
        """Numbers of tokens."""
        out = [0] * len(texts)
        for special in (True, False):
            rows = [i for i, is_plain in enumerate(plain) if (is_plain or not self._template) is special]
            if rows:
                ids = self._tokenizer([texts[i] for i in rows], add_special_tokens=special)["input_ids"]
                for row, tokens in zip(rows, ids, strict=True):
                    out[row] = len(tokens)
        return out


class ReasoningGymSource:
    """Tasks of the reasoning-gym package. Columns: `entry` (the package's whole item), `answer`, `task`.

    An item that is too long or held out is replaced by the next one in order that is neither.
    """

    def __init__(
        self,
        prompts: ReasoningGymPrompts,
        config: Config,
        encoder: PromptEncoder,
        shuffle: bool,
        held_out: frozenset[str],
    ) -> None:
        self._data = _reasoning_gym(prompts)
        self.counts = Counts(len(self._data))
        self._task, self._encoder = prompts.task, encoder
        self._log = Logger(config.run.run_id, "source")
        self._limit = config.sampling.max_prompt_tokens
        self._order = _Order(prompts.size, config.run.seed, shuffle)
        self._held_out = held_out
        self._unusable: set[int] = set()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, position: int) -> Sourced:
        for candidate in range(position, position + len(self)):
            index = self._order(candidate)
            if index in self._unusable:
                continue
            entry = datafiles.plain(self._data[index])
            text = self._encoder.text([{"role": "user", "content": entry["question"]}])
            tokens = self._encoder.tokens(text, plain=False)
            if len(tokens) <= self._limit and text not in self._held_out:
                return Sourced(tokens, text, {"entry": entry, "answer": entry["answer"], "task": self._task})
            self._unusable.add(index)
            self._log.debug("%s: item %d is too long or held out, %d so far", self._task, index, len(self._unusable))
        raise ConfigError(
            f"prompts: all {len(self)} prompts of {self._task!r} have more than {self._limit} tokens "
            "(sampling.max_prompt_tokens) or are held out for evaluation (eval.prompts)"
        )


class DatasetSource:
    """Rows of a data set; see `broker.datafiles` for the schemas."""

    def __init__(
        self,
        prompts: DatasetPrompts,
        config: Config,
        encoder: PromptEncoder,
        shuffle: bool,
        held_out: frozenset[str],
    ) -> None:
        self._data = datafiles.load(prompts)
        datafiles.require_column(prompts, self._data.column_names)
        self._column, self._encoder = prompts.prompt_column, encoder
        self._log = Logger(config.run.run_id, "source")
        unique = self._unique(prompts, strict=not shuffle)
        self._rows = self._usable(unique, prompts, config.sampling.max_prompt_tokens, held_out)
        self.counts = Counts(len(self._data), len(self._data) - len(unique), len(unique) - len(self._rows))
        self._order = _Order(len(self._rows), config.run.seed, shuffle)

    def _unique(self, prompts: DatasetPrompts, strict: bool) -> list[int]:
        """The first row of each prompt. Duplicates that contradict it are refused (`strict`) or logged."""
        unique, conflicts = datafiles.unique_rows(self._data, prompts)
        if conflicts:
            some = "; ".join(conflicts[:3]) + ("; ..." if len(conflicts) > 3 else "")
            rows = f"{len(conflicts)} of {len(self._data)} rows"
            message = f"{prompts.path!r}: {rows} repeat a prompt with another right answer: {some}"
            if strict:
                raise ConfigError(f"prompts.path: {message}; correct them, or keep every row (deduplicate: false)")
            self._log.warning("%s; the first row of each counts", message)
        return unique

    def _usable(
        self, unique: list[int], prompts: DatasetPrompts, limit: int, held_out: frozenset[str]
    ) -> list[int]:
        short: list[int] = []
        for start in range(0, len(unique), 1024):
            rows = unique[start : start + 1024]
            batch = list(self._data.select(rows)[self._column])
            self._check_kinds(batch, prompts)
            texts = [self._encoder.text(value) for value in batch]
            lengths = self._encoder.lengths(texts, [isinstance(value, str) for value in batch])
            short += [
                row
                for row, length, text in zip(rows, lengths, texts, strict=True)
                if 0 < length <= limit and text not in held_out
            ]
        total = len(self._data)
        self._log.info(
            "%s: %d rows, %d duplicates dropped, %d prompts of more than %d tokens or held out left out, %d remain",
            *(prompts.path, total, total - len(unique), len(unique) - len(short), limit, len(short)),
        )
        if not short:
            raise ConfigError(
                f"prompts.path: {prompts.path!r} has no usable prompt: {len(self._data)} rows, {len(unique)} different "
                f"prompts, none of 1 to {limit} tokens (sampling.max_prompt_tokens) that is not held out (eval.prompts)"
            )
        return short

    def _check_kinds(self, batch: Sequence[Any], prompts: DatasetPrompts) -> None:
        if any(isinstance(value, str) for value in batch):
            if prompts.system is not None:
                raise ConfigError(
                    f"prompts.system: set, but column {prompts.prompt_column!r} holds plain text, which has no roles; "
                    "use null, or prompts given as messages"
                )
        else:
            self._encoder.require_template()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Sourced:
        row = self._data[self._rows[self._order(position)]]
        prompt = row[self._column]
        text = self._encoder.text(prompt)
        tokens = self._encoder.tokens(text, plain=isinstance(prompt, str))
        return Sourced(tokens, text, datafiles.columns_from_row(row, self._column))


def open_source(
    prompts: PromptsConfig, config: Config, tokenizer: object | None = None, *, shuffle: bool = True
) -> Source:
    """The source that `prompts` describes.

    Args:
        prompts: `config.prompts`, or `config.eval.prompts`; the former leaves out what the latter holds (compared as
            rendered text), so that evaluation measures what was not trained on.
        config: model (tokenizer, chat template), run seed and prompt limit come from it.
        tokenizer: a loaded tokenizer of the model; None: it is loaded.
        shuffle: a new order on every pass (training); False: the data's own order, and rows that repeat a prompt with
            another right answer are refused (evaluation).

    Raises:
        ConfigError: names the field and, for a data set, the column or row that cannot be used.
    """
    tokenizer = load_tokenizer(config) if tokenizer is None else tokenizer
    held_out: frozenset[str] = frozenset()
    if prompts is config.prompts and config.eval is not None:
        source = open_source(config.eval.prompts, config, tokenizer, shuffle=False)
        held_out = frozenset(source[position].text for position in range(min(config.eval.limit, len(source))))
    encoder = PromptEncoder(prompts, config, tokenizer)
    if isinstance(prompts, ReasoningGymPrompts):
        return ReasoningGymSource(prompts, config, encoder, shuffle, held_out)
    return DatasetSource(prompts, config, encoder, shuffle, held_out)


def load_tokenizer(config: Config) -> Any:
    """The model's tokenizer. Raises ConfigError where it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # transformers raises many kinds; all mean that this path has no usable tokenizer
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.path: no tokenizer loads from {config.model.path!r}: {reason:.300}") from error


def check_source(config: Config) -> None:
    """Start-up check: the model is there, and every source's task or data, without loading either.

    Raises:
        ConfigError: names the field, the value and what would be right.
    """
    _check_model(config.model.path)
    for field, prompts in (("prompts", config.prompts), ("eval.prompts", config.eval.prompts if config.eval else None)):
        if isinstance(prompts, ReasoningGymPrompts):
            _reasoning_gym(prompts, field)
        elif isinstance(prompts, DatasetPrompts):
            datafiles.require_column(prompts, datafiles.columns_of(prompts), f"{field}.prompt_column")


def _check_model(path: str) -> None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {path!r} has no config.json; expected a Hugging Face model folder")
        if not any((folder / name).is_file() for name in _TOKENISER_FILES):
            raise ConfigError(f"model.path: {path!r} has no tokenizer; expected one of {', '.join(_TOKENISER_FILES)}")
        return
    if datafiles.looks_like_path(path):
        raise ConfigError(f"model.path: no such folder: {path!r}; expected a Hugging Face model folder or a hub name")
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    try:
        HfApi().model_info(path, timeout=5)
    except Exception as error:  # unknown, private, or no network: the name cannot be used from here
        reason = type(error).__name__
        raise ConfigError(
            f"model.path: {path!r} is neither a folder nor a model that can be reached on the hub ({reason})"
        ) from None


def _reasoning_gym(prompts: ReasoningGymPrompts, field: str = "prompts") -> Any:
    """The package's data set.

    Raises:
        ConfigError: an unknown task (close matches are listed), or options that the task refuses.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"{field}.type: 'reasoning_gym' needs the package reasoning-gym: {error}") from None
    if prompts.task not in DATASETS:
        close = get_close_matches(prompts.task, DATASETS, n=5, cutoff=0.5)
        hint = f"close matches: {', '.join(close)}" if close else f"there are {len(DATASETS)}, for example chain_sum"
        raise ConfigError(f"{field}.task: reasoning-gym has no task {prompts.task!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(prompts.task, size=prompts.size, seed=prompts.seed, **prompts.options)
    except Exception as error:  # the tasks check their options with assertions
        raise ConfigError(
            f"{field}.options: task {prompts.task!r} refuses {prompts.options!r}: {error or type(error).__name__}"
        ) from None
