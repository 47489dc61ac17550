"""vLLM's processes end with the generator that started them, however it ends.

vLLM stops its engine process from the one that made it; after a SIGKILL, by the kernel short of memory for instance,
nobody does, and the engine would keep its GPU from the generator's successor.
"""

from __future__ import annotations

import os
import select
import threading
from functools import cache

_VARIABLE = "HEADRACE_ENGINE_OF"  # the generator's pid


def tie() -> None:
    """What this process starts from now on, and calls `follow`, ends with it."""
    os.environ[_VARIABLE] = str(os.getpid())


@cache  # vLLM loads a plug-in as often as it likes
def follow() -> None:
    """End this process when the generator whose engine it is has ended; of no effect in others."""
    pid = int(os.environ.get(_VARIABLE, os.getpid()))
    if pid == os.getpid():
        return
    try:
        generator = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_after, args=(generator,), name="lifeline", daemon=True).start()


def _end_after(generator: int) -> None:
    poll = select.poll()
    poll.register(generator, select.POLLIN)
    poll.poll()
    os._exit(1)
