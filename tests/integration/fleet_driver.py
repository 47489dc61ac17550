"""`python fleet_driver.py CONFIG COMMANDS`: `headrace up` with the members of a JSON file instead of the real ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from broker.local import Fleet
from broker.processes import Command
from common import settings

if __name__ == "__main__":
    members = json.loads(Path(sys.argv[2]).read_text())
    commands = [Command(each["name"], each["role"], tuple(each["argv"]), {}) for each in members]
    sys.exit(Fleet(settings.load(Path(sys.argv[1])), commands).run())
