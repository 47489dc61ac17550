"""Looks msgpack bytes over before anything is built from them.

A few bytes can promise gigabytes, or millions of empty maps of 64 bytes each. The walk below follows the headers only:
it allocates nothing, and refuses what ends early, promises more than is there, or holds more values than its reader
has use for. What passes costs its reader at most its own length and about 72 bytes a value.
"""

from __future__ import annotations

from common.errors import WireError

# First byte -> bytes of a value whose length the first byte tells (https://github.com/msgpack/msgpack: spec.md).
_WHOLE = {
    0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9,
    **dict.fromkeys(range(0x80), 1),  # small integers
    **dict.fromkeys(range(0xE0, 0x100), 1),
    **{0xA0 + length: 1 + length for length in range(32)},  # short text
}  # fmt: skip
# First byte -> bytes of the length after it, and what it counts.
_COUNTED = {
    0xC4: (1, "bytes"), 0xC5: (2, "bytes"), 0xC6: (4, "bytes"),
    0xD9: (1, "bytes of text"), 0xDA: (2, "bytes of text"), 0xDB: (4, "bytes of text"),
}  # fmt: skip
# First byte -> bytes of the count after it, and values for each that it counts.
_MANY = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_shape(data: bytes, most_values: int, where: str) -> None:
    """Look over one msgpack value; `most_values` bounds how many values it may hold, keys and containers included.

    Raises:
        WireError: starts with `where`; says at which byte what is wrong. Extension types are refused: we send none.
    """
    position, seen, expected, size = 0, 0, 1, len(data)
    while seen < expected:
        if position >= size:
            raise WireError(f"{where} ends after {size} bytes, {expected - seen} values too early")
        first = data[position]
        seen += 1
        if (length := _WHOLE.get(first)) is not None:
            position += length
        elif first in _COUNTED:
            width, what = _COUNTED[first]
            length = int.from_bytes(data[position + 1 : position + 1 + width])
            if length > size - position - 1 - width:
                raise WireError(
                    f"{where} promises {length} {what} at byte {position}; {max(0, size - position - 1 - width)} follow"
                )
            position += 1 + width + length
        elif first < 0xA0:  # a small map or list
            expected += (first & 15) * (2 if first < 0x90 else 1)
            position += 1
        elif first in _MANY:
            width, each = _MANY[first]
            expected += each * int.from_bytes(data[position + 1 : position + 1 + width])
            position += 1 + width
        else:
            raise WireError(f"{where} has an extension or no type at byte {position} (0x{first:02x})")
        if expected > most_values:
            raise WireError(f"{where} holds at least {expected} values; expected {most_values} at most")
    if position != size:
        at = "ends early" if position > size else f"is followed by {size - position} bytes more"
        raise WireError(f"{where} of {size} bytes {at}")
