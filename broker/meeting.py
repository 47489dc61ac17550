"""Where the nodes of an elastic learner meet: torchrun's store, in the broker service.

In one of the learner's nodes it would make that node the one that must not die, since the others end with it. Here it
outlives any of them. It holds nothing but the rendezvous in progress, so losing it costs the learner a restart.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from common.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

VARIABLE = "HEADRACE_STORE_PORT"


def open_store() -> TCPStore | None:
    """The store on the port in HEADRACE_STORE_PORT, for as long as the returned object lives; None where it is not set.

    Raises:
        ConfigError: no port, or one that is taken.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ConfigError(f"{VARIABLE}: is {text!r}; expected a port between 1 and 65535")
    from torch.distributed import TCPStore

    try:
        return TCPStore("0.0.0.0", int(text), is_master=True, wait_for_workers=False)
    except RuntimeError as error:  # torch's DistNetworkError derives from it
        raise ConfigError(f"{VARIABLE}: port {text} cannot be used: {str(error).splitlines()[0]}") from None
