"""state.json: what a server is doing, for people, for `wherry wait` and for eval. Replaced as a whole, never edited."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from wherry.errors import WherryError
from wherry.files import read_json, write_json


class Phase(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return not FOLLOWED_BY[self]


# starting → ready: a server whose log does not say that it loads.
FOLLOWED_BY: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.LOADING, Phase.READY, Phase.DRAINING, Phase.FAILED}),
    Phase.LOADING: frozenset({Phase.READY, Phase.DRAINING, Phase.FAILED}),
    Phase.READY: frozenset({Phase.DRAINING, Phase.FAILED}),
    Phase.DRAINING: frozenset({Phase.STOPPED}),
    Phase.STOPPED: frozenset(),
    Phase.FAILED: frozenset(),
}

HEARTBEAT = 30.0
"""Seconds between two writes of a state that does not change."""

SILENCE = 4 * HEARTBEAT
"""Seconds without a write after which a supervisor on another machine counts as dead."""


@dataclass
class State:
    state: Phase
    which: str
    model: str
    url: str
    log: str
    api_key_file: str
    supervisor_pid: int
    supervisor_id: str
    host: str
    job: str | None = None
    pid: int | None = None
    max_model_len: int | None = None
    started: float = 0.0
    updated: float = 0.0
    ready_after_s: float | None = None
    progress: str | None = None
    reason: str | None = None
    hint: str | None = None

    @classmethod
    def here(cls, **values: Any) -> State:
        """A new attempt, supervised by this process."""
        return cls(
            state=Phase.STARTING,
            supervisor_pid=os.getpid(),
            supervisor_id=identity(os.getpid()) or "",
            host=socket.gethostname(),
            job=os.environ.get("SLURM_JOB_ID"),
            started=time.time(),
            **values,
        )

    def is_abandoned(self) -> bool:
        """Whether the supervisor is gone though the state is not over: killed, or its machine went away.

        On this machine the process table answers at once; for another one only the age of the last write can.
        """
        if self.state.is_over:
            return False
        namespace = self.supervisor_id.partition("/")[0]
        if self.host == socket.gethostname() and namespace == _pid_namespace():
            return identity(self.supervisor_pid) != self.supervisor_id
        return time.time() - self.updated > SILENCE


def identity(pid: int) -> str | None:
    """'PID namespace/start time' of a living process, so that a reused pid, or that of another container, differs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()  # the name, in parentheses, may itself hold spaces
    return None if after_name[0] in "ZX" else f"{_pid_namespace()}/{after_name[19]}"


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def read_state(path: Path) -> State | None:
    """The state in a file, or None where no server was ever started. Raises WherryError for a damaged file."""
    if not path.is_file():
        return None
    found = read_json(path)
    try:
        known = {field.name for field in fields(State)}
        state = State(**{name: value for name, value in found.items() if name in known})
        state.state = Phase(state.state)
    except (AttributeError, TypeError, ValueError) as error:
        raise WherryError(f"{path.name} is not a server's state: {error}", str(path), "delete it") from None
    return state


class StateFile:
    """The one writer of a state file."""

    def __init__(self, path: Path, state: State) -> None:
        self.path, self.state = path, state
        self._write()

    def change(self, phase: Phase, **values: Any) -> None:
        """Go to phase. Raises ValueError for a step that the design does not have: that is a bug."""
        if phase not in FOLLOWED_BY[self.state.state]:
            raise ValueError(f"{self.state.state} is not followed by {phase}")
        self.state.state = phase
        self.note(**values)

    def note(self, **values: Any) -> None:
        """Write values without a change of phase."""
        for name, value in values.items():
            setattr(self.state, name, value)
        self._write()

    def beat(self) -> None:
        if time.time() - self.state.updated > HEARTBEAT:
            self._write()

    def _write(self) -> None:
        self.state.updated = time.time()
        write_json(self.path, asdict(self.state))
