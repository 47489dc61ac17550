"""The message that holds what was sampled of a group whose generator could not finish it; see `common.wire`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from common.errors import WireError
from common.trajectory import NOTHING_YET, PartialGroup, PartialResponse, VersionRun
from common.wire import _check_runs, _field, _identity, _number, _token_ids, pack, pack_array, unpack, unpack_array


def encode_partial(partial: PartialGroup) -> bytes:
    return pack(
        "partial",
        {
            "id": partial.group_id,
            "temperature": partial.temperature,
            "responses": [_pack_response(response) for response in partial.responses],
        },
    )


def _pack_response(response: PartialResponse) -> dict[str, Any] | None:
    if len(response.token_ids) == 0:
        return None
    return {
        "ids": pack_array(response.token_ids),
        "logprobs": pack_array(response.logprobs),
        "versions": [[run.version, run.start] for run in response.versions],
        "finish": response.finish_reason,
    }


def decode_partial(data: bytes, group_id: str, group_size: int) -> PartialGroup:
    """What was sampled of the group `group_id`, whose prompt asks for `group_size` responses.

    Raises:
        WireError: it is of another group or of another size, or anything in it is not as promised.
    """
    message = unpack(data, "partial")
    if (found := _identity(message, "partial")) != group_id:
        raise WireError(f"partial {found}: came with the prompt {group_id}")
    where = f"partial {group_id}"
    responses = _field(message, "responses", list, where)
    if len(responses) != group_size:
        raise WireError(f"{where}: {len(responses)} responses; expected {group_size}")
    return PartialGroup(
        group_id=group_id,
        responses=tuple(_unpack_response(value, where, index) for index, value in enumerate(responses)),
        temperature=_number(message, "temperature", where),
    )


def _unpack_response(value: Any, group: str, index: int) -> PartialResponse:
    if value is None:
        return NOTHING_YET
    where = f"{group}: response {index}"
    if not isinstance(value, dict):
        raise WireError(f"{where}: is a {type(value).__name__}; expected a map or null")
    token_ids = _token_ids(value.get("ids"), where)
    logprobs = unpack_array(value.get("logprobs"), "f4", f"{where}: logprobs", len(token_ids))
    if not np.isfinite(logprobs).all():
        raise WireError(f"{where}: a logprob is not finite")
    finish = value.get("finish")
    if finish not in (None, "stop", "length"):
        raise WireError(f"{where}: finish reason {finish!r:.80}; expected 'stop', 'length' or null")
    runs = _runs(value, where)
    _check_runs(runs, len(token_ids), group, index)
    return PartialResponse(token_ids, logprobs, tuple(VersionRun(*run) for run in runs), finish)


def _runs(value: Mapping[str, Any], where: str) -> list[tuple[int, int]]:
    """Pairs of version and first token, at least one."""
    items = _field(value, "versions", list, where)
    for item in items:
        if not (isinstance(item, list) and len(item) == 2 and all(type(x) is int and 0 <= x < 2**63 for x in item)):
            raise WireError(f"{where}: version run {item!r:.80}; expected [version, start]")
    if not items:
        raise WireError(f"{where}: no version runs; expected at least one")
    return [(version, start) for version, start in items]
