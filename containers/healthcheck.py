"""HEALTHCHECK of the image: a container that serves is healthy when its server is ready; every other mode passes.

Reads only what `wherry serve` writes: $WHERRY_RUNS/*/serve/state.json. The standard library alone, so that it is quick.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any


def serves() -> bool:
    """Whether the command that this container was started with has the word serve."""
    return b"serve" in Path("/proc/1/cmdline").read_bytes().split(b"\0")


def newest_state(runs: Path) -> dict[str, Any] | None:
    """The state last written by a server on this host: a run directory may hold those of other runs and machines."""
    states = []
    for path in runs.glob("*/serve/state.json"):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(state, dict) and state.get("host") == socket.gethostname():
            states.append(state)
    return max(states, key=lambda state: state.get("updated", 0), default=None)


def main() -> int:
    if not serves():
        return 0
    runs = Path(os.environ.get("WHERRY_RUNS") or "runs")
    state = newest_state(runs)
    if state is None:
        print(f"no server of this host in {runs.absolute()}/*/serve/state.json")
        return 1
    print(f"{state.get('state')}: {state.get('reason') or state.get('url')}")
    return 0 if state.get("state") == "ready" else 1


if __name__ == "__main__":
    sys.exit(main())
