"""Coverage-guided fuzzing of the decoders, by hand: `pip install atheris`, then

    python -m tests.fuzz [corpus folder] [libFuzzer's options, as -max_total_time=3600]

Whatever the bytes, a decoder returns a message or raises WireError, in little time and memory; all else is a finding,
and libFuzzer writes the bytes to a file. The first byte chooses the decoder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["common", "msgpack"]):
    from common.errors import WireError
    from common.trajectory import EvalAnswer, EvalAnswers
    from common.wire import decode_answers, decode_group, decode_prompt, encode_answers, unpack

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from wire_messages import a_group, a_prompt

DECODERS = (decode_group, decode_prompt, decode_answers, lambda data: unpack(data, "member"))
SEEDS = (a_group(), a_prompt(), encode_answers(EvalAnswers(4, 7, (EvalAnswer(3, True, 0.25, False, 4, 6),))), b"\x80")


def test_one_input(data: bytes) -> None:
    if data:
        try:
            DECODERS[data[0] % len(DECODERS)](data[1:])
        except WireError:
            pass


def main() -> None:
    folders = [each for each in sys.argv[1:] if not each.startswith("-")]
    corpus = Path(folders[0] if folders else tempfile.mkdtemp())
    for index, seed in enumerate(SEEDS):
        (corpus / f"seed-{index}").write_bytes(bytes([index]) + seed)
    options = [each for each in sys.argv[1:] if each.startswith("-")]
    atheris.Setup([sys.argv[0], str(corpus), "-timeout=5", "-rss_limit_mb=1024", "-max_len=4096", *options], test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
