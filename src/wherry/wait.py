"""wherry wait: block until a run's server is ready and print its url; exit 5 when it failed, stopped or is late.

Start it beside `wherry serve` or before it: a run without a server yet is waited for.
"""

from __future__ import annotations

import time
from pathlib import Path

from wherry.cli import open_run, parser
from wherry.errors import Exit, WherryError
from wherry.serve.state import Phase, State, read_state

POLL = 0.2
"""Seconds between two looks at the state."""

GRACE = 3.0
"""Seconds for a server that is being started just now to replace the state that an earlier one left behind."""


def wait(path: Path, timeout: float | None = None) -> State:
    """The state, once ready. timeout in seconds; None waits for ever.

    Raises WherryError (SERVER) where the server failed, stopped, lost its supervisor, or is not ready in time.
    """
    begun, wall = time.monotonic(), time.time()
    while True:
        state, waited = read_state(path), time.monotonic() - begun
        if state is not None:
            ended = _why_not_coming(state)
            if ended is None and state.state is Phase.READY:
                return state
            if ended is not None and (state.updated >= wall or waited >= GRACE):
                raise WherryError(ended, f"{path} (log: {state.log})", state.hint or "start it again", Exit.SERVER)
        if timeout is not None and waited >= timeout:
            found = "no server was started" if state is None else f"the server is {state.progress or state.state}"
            what, fix = f"not ready after {timeout:g} s: {found}", "wait longer (--timeout), or see the server's log"
            raise WherryError(what, str(path), fix, Exit.SERVER)
        time.sleep(POLL)


def _why_not_coming(state: State) -> str | None:
    if state.state is Phase.FAILED:
        return f"the server failed: vLLM {state.reason}"
    if state.state in (Phase.STOPPED, Phase.DRAINING):
        return f"the server is {state.state}"
    if state.is_abandoned():
        return f"the server's supervisor (process {state.supervisor_pid} on {state.host}) is gone; it was {state.state}"
    return None


def main(arguments: list[str]) -> int:
    made = parser("wait", __doc__, "wherry wait --run demo --timeout 1800")
    made.add_argument("--timeout", type=float, metavar="S", help="seconds (default: no limit)")
    options = made.parse_args(arguments)
    print(wait(open_run(options).dir("serve") / "state.json", options.timeout).url)
    return 0
