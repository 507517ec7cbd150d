"""Which model, which command, which port; and a process group that never outlives the one who started it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherry.device import has_gpu
from wherry.errors import Exit, WherryError
from wherry.rundir import Run
from wherry.serve.auth import KEY_FILE

HOST = "127.0.0.1"

# vLLM's plain switches: they are off by default and have no --no-… form.
SWITCHES = frozenset({"disable_log_stats", "aggregate_engine_logging"})
# Lists that vLLM reads as one JSON value; all others are several values.
JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})


@dataclass(frozen=True)
class Served:
    """A model folder, its tokenizer, and the name that clients ask for."""

    which: str
    name: str
    model: Path
    tokenizer: Path


def served(run: Run, which: str | None) -> Served:
    """The base or the merged model of a run. Raises WherryError where that mode has not finished."""
    which = which or ("merged" if run.is_complete("merge") else "base")
    if which == "merged":
        run.require("merge")
        model = tokenizer = run.dir("merge") / "model"
    else:
        run.require("prepare")
        model, tokenizer = run.dir("prepare") / "model", run.dir("prepare") / "tokenizer"
    for folder in {model, tokenizer}:
        if not folder.is_dir():
            raise WherryError(
                f"the {which} model's folder is not there"
                + (f" (a link to {folder.readlink()})" if folder.is_symlink() else ""),
                str(folder),
                "put it back, or run the mode that writes it in another run (--run NEW_NAME)",
                Exit.PREFLIGHT,
            )
    return Served(which, f"{run.name}-base" if which == "base" else run.name, model.absolute(), tokenizer.absolute())


def vllm_command(run: Run, what: Served, port: int) -> list[str]:
    """vLLM's command line."""
    given = dict(run.recipe.serve.vllm)
    if not has_gpu():
        given.setdefault("enforce_eager", True)  # on a CPU, compiling takes longer than it saves
    given.setdefault("disable_access_log_for_endpoints", "/health")  # the watch asks every few seconds
    # Running requests are finished on SIGTERM; what is kept back of the time is for the engine's own end.
    given.setdefault("shutdown_timeout", max(0, int(run.recipe.serve.drain_timeout) - 5))
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    line += ["--model", str(what.model), "--tokenizer", str(what.tokenizer), "--served-model-name", what.name]
    line += ["--host", HOST, "--port", str(port), "--middleware", "wherry.serve.auth.RequireKey"]
    if run.recipe.model.trust_remote_code:
        line.append("--trust-remote-code")
    return line + [word for name, value in given.items() for word in flag(name, value)]


def flag(name: str, value: Any) -> list[str]:
    """One recipe entry as vLLM's command line has it."""
    dashed = name.replace("_", "-")
    if value is None or (value is False and name in SWITCHES):
        return []
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    if isinstance(value, list) and name not in JSON_LISTS:
        return [f"--{dashed}", *(_word(item) for item in value)]
    return [f"--{dashed}", _word(value)]


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def environment(key_file: Path, vllm: Mapping[str, Any]) -> dict[str, str]:
    """The child's environment: no network, no stray modules, no key."""
    env = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}  # it would be a second key
    env |= {
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        KEY_FILE: str(key_file),
    }
    if int(vllm.get("nnodes") or 1) == 1:
        env.setdefault("VLLM_HOST_IP", HOST)  # else the engine's processes meet over the site's network
    if not has_gpu():
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    return env


def choose_port(port: int | None) -> int:
    """A free port, or the given one. Raises WherryError (exit 3) where that is taken or not allowed."""
    with socket.socket() as probe:
        # A server that just stopped leaves its connections in TIME_WAIT; vLLM binds over them, and so must this.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
            probe.listen(1)
        except OSError as error:
            raise WherryError(
                f"port {port} cannot be used: {(error.strerror or str(error)).lower()}",
                f"--port {port}",
                "give another port, or leave --port out and a free one is found",
                Exit.PREFLIGHT,
            ) from None
        return int(probe.getsockname()[1])


# Ends the group when this process is gone without a word: the read that waits for a line meets the pipe's end.
GUARD = 'read -r group || exit; read -r _ && exit; kill -s TERM -- "-$group"; sleep 2; kill -s KILL -- "-$group"'


class Child:
    """A command in a process group of its own, which ends when this process ends, even by SIGKILL.

    vLLM's engine survives the death of its API process and keeps the GPU; so the whole group is killed, every time.
    A death signal (prctl) would reach the first process alone.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], **popen: Any) -> None:
        """popen: further arguments of subprocess.Popen. Raises OSError where the command cannot be started."""
        hold, self._lifeline = os.pipe()
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._guard = subprocess.Popen(["/bin/sh", "-c", GUARD], stdin=hold, start_new_session=True, **silent)
        os.close(hold)
        try:
            self._process = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True, **popen
            )
        except BaseException:
            self._release()
            raise
        os.write(self._lifeline, b"%d\n" % self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float) -> int | None:
        """The exit code, or None after timeout seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def end(self, grace: float) -> None:
        """SIGTERM, up to grace seconds, then SIGKILL for all that is left. An interrupt ends the grace."""
        try:
            if self.poll() is None:
                self._process.terminate()
                self.wait(grace)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL for the whole group, and wait (up to 10 s) until nothing of it holds memory any more."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + 10
        while _group_lives(self.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._release()

    def _release(self) -> None:
        """Send the guard away: nothing is left to guard."""
        if self._lifeline < 0:
            return
        with suppress(BrokenPipeError):
            os.write(self._lifeline, b"\n\n")
        os.close(self._lifeline)
        self._lifeline = -1
        self._guard.wait()


def _group_lives(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def how_it_ended(code: int) -> str:
    """'ended with exit code 1', 'was killed by SIGKILL': as a reason says it."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
