"""wherry serve: run vLLM behind the readiness gate, watched, until it is told to stop.

What clients need (url, model, key file) stands in <run>/serve/state.json as long as the server lives.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

from wherry.cli import open_run, parser, say
from wherry.errors import Exit, WherryError
from wherry.rundir import Run
from wherry.serve import diagnose
from wherry.serve.auth import make_key
from wherry.serve.command import HOST, Child, choose_port, environment, how_it_ended, served, vllm_command
from wherry.serve.gate import NotYet, Questions, Readiness, Watch
from wherry.serve.state import Phase, State, StateFile, read_state

__all__ = ["Server", "main"]

TICK = 0.05
"""Seconds between two looks at a process."""

SAY_EVERY = 10.0
"""Seconds between two lines of progress."""

TAIL = 1 << 20
"""Bytes of the log's end that a diagnosis reads."""


class Server:
    """vLLM as a supervised child: `with Server(run) as server:` blocks until it is ready, and stops it at the end.

    which: "base" or "merged"; None takes the merged model where there is one. port: None finds a free one.
    command: replaces vLLM's command line; it is called with the port and gets the same environment (for tests).

    In the block SIGTERM raises KeyboardInterrupt as SIGINT does, so that a cancelled job stops its server as well.
    Raises WherryError: USAGE or PREFLIGHT before anything is started; SERVER when vLLM ends without being asked, is not
    ready after serve.ready_timeout seconds, or no longer answers.
    """

    def __init__(
        self,
        run: Run,
        which: str | None = None,
        port: int | None = None,
        *,
        command: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        self.folder = run.dir("serve")
        self.log = self.folder / "vllm.log"
        self.api_key_file = self.folder / "api_key"
        self._recipe = run.recipe.serve
        self._what = served(run, which)
        self._refuse_a_second()
        self._port = choose_port(port)
        self._command = list(command(self._port) if command else vllm_command(run, self._what, self._port))

    # -- what clients need ----------------------------------------------------------------------------------------

    @property
    def which(self) -> str:
        return self._what.which

    @property
    def model(self) -> str:
        """The name that requests must carry."""
        return self._what.name

    @property
    def url(self) -> str:
        """Without /v1: http://127.0.0.1:PORT"""
        return f"http://{HOST}:{self._port}"

    @property
    def max_model_len(self) -> int | None:
        """Prompt and answer together, in tokens, as the server says."""
        return self._file.state.max_model_len

    @property
    def state(self) -> State:
        return self._file.state

    # -- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Server:
        self._leave = ExitStack()
        try:
            self._leave.enter_context(_sigterm_interrupts())
            self._claim()
            self._leave.callback(self._stop)
            self._start()
            self._await_ready()
        except BaseException:
            self._leave.close()
            raise
        return self  # nothing is called from here on: an interrupt meets either the except or the caller's block

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.close()

    def watch(self) -> NoReturn:
        """Block as long as the server works. Raises WherryError (SERVER) when it does not any more."""
        while True:
            self._look()
            time.sleep(TICK)

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any) -> int:
        """Run a client command and return its exit code; env is added to this process's environment.

        popen: further arguments of subprocess.Popen (not stdin). The client dies with the server, and with this
        process. Raises WherryError (SERVER) as soon as the server does not work any more.
        """
        client = Child(argv, {**os.environ, **(env or {})}, **popen)
        try:
            while (code := client.wait(TICK)) is None:
                self._look()
            if code != 0:
                self._blame(how_it_ended(code))
            return code
        finally:
            client.end(grace=10)

    # -- starting -------------------------------------------------------------------------------------------------

    def _refuse_a_second(self) -> None:
        path = self.folder / "state.json"
        other = read_state(path)
        if other is None or other.state.is_over or other.is_abandoned():
            return
        raise WherryError(
            f"this run already has a server: {other.state}, {other.url}, model {other.model}",
            f"{path}: process {other.supervisor_pid} on {other.host}",
            "use that one, or stop it first (SIGTERM to that process, or scancel its job)",
            Exit.PREFLIGHT,
        )

    def _claim(self) -> None:
        """Become the run's one server. The lock is held for this moment only: the state says who it is from then on."""
        from filelock import FileLock

        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".claim.lock"):
            self._refuse_a_second()
            state = State.here(
                which=self.which,
                model=self.model,
                url=self.url,
                log=str(self.log.absolute()),
                api_key_file=str(self.api_key_file.absolute()),
            )
            self._file = StateFile(self.folder / "state.json", state)
        self._child: Child | None = None
        self._begun = time.monotonic()

    def _start(self) -> None:
        key = make_key(self.api_key_file)
        self._questions = Questions(self._port, key, self.model)
        with self.log.open("ab") as log:
            log.write(_header(self.model).encode())
            log.flush()
            self._log_begin = log.tell()
            env = environment(self.api_key_file.absolute(), self._recipe.vllm)
            self._child = Child(self._command, env, stdout=log, stderr=log)
        self._file.note(pid=self._child.pid)
        say(f"starting {self.model} (the {self.which} model) at {self.url}, log {self.log}")

    def _await_ready(self) -> None:
        readiness = Readiness(self._questions)
        next_line = self._begun + SAY_EVERY
        with self.log.open("rb") as log:
            log.seek(self._log_begin)
            while not readiness.look():
                self._note_progress(log)
                self._require_alive()
                if self._elapsed() > self._recipe.ready_timeout:
                    self._fail(f"not ready after {self._recipe.ready_timeout:g} s: {readiness.missing}")
                if time.monotonic() >= next_line:
                    say(f"{self._elapsed():5.0f} s  {self.state.progress or self.state.state}")
                    next_line += SAY_EVERY
                time.sleep(TICK)
        self._require_alive()  # the answers may have come from a process that is gone by now
        after = round(self._elapsed(), 2)
        self._file.change(Phase.READY, max_model_len=readiness.length, ready_after_s=after, progress=None)
        self._watch = Watch(self._questions)
        say(f"ready after {after:.1f} s: {self.url}, model {self.model}, key in {self.api_key_file}")

    def _note_progress(self, log: BinaryIO) -> None:
        step = diagnose.progress(log.read(TAIL).decode(errors="replace"))
        if step is None or step == self.state.progress:
            self._beat()
        elif self.state.state is Phase.STARTING:
            self._file.change(Phase.LOADING, progress=step)
        else:
            self._file.note(progress=step)

    # -- watching -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Raises WherryError where the server does not work any more; never blocks."""
        self._require_alive()
        if reason := self._watch.look():
            self._fail(reason)
        self._beat()

    def _beat(self) -> None:
        with suppress(OSError):  # a full disk must not end a server that works
            self._file.beat()

    def _require_alive(self) -> None:
        assert self._child is not None
        code = self._child.poll()
        if code is not None:
            before = "" if self.state.state is Phase.READY else ", before it was ready"
            self._fail(f"{how_it_ended(code)} after {self._elapsed():.1f} s{before}", killed=code == -signal.SIGKILL)

    def _blame(self, client: str) -> None:
        """A client failed: was it the server? vLLM's API process outlives its engine by some seconds."""
        self._require_alive()
        try:
            self._questions.token()
        except NotYet as why:
            self._require_alive()
            self._fail(f"no longer answers ({why}); its client {client}")

    def _fail(self, reason: str, killed: bool = False) -> NoReturn:
        line, hint = diagnose.diagnose(self._log_end())
        if killed and not line:
            hint = diagnose.KILLED_ADVICE
        with suppress(OSError):  # a full disk must not hide the reason
            self._file.change(Phase.FAILED, reason=reason, hint=hint, progress=None)
        raise WherryError(f"vLLM {reason}", f"{self.log}: {line}" if line else str(self.log), hint, Exit.SERVER)

    def _log_end(self) -> str:
        with self.log.open("rb") as log:
            log.seek(max(self._log_begin, log.seek(0, os.SEEK_END) - TAIL))
            return log.read().decode(errors="replace")

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    # -- stopping -------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        failed = self.state.state is Phase.FAILED
        if not failed:
            with suppress(OSError):  # a full disk must not keep the server running
                self._file.change(Phase.DRAINING, progress=None)
        try:
            if self._child is not None:
                self._child.end(0 if failed else self._recipe.drain_timeout)
        finally:
            if not failed:
                self._file.change(Phase.STOPPED, pid=None)


def _header(model: str) -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f"\n==== {now}: {model} on {socket.gethostname()}, supervised by process {os.getpid()} ====\n"


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM and SIGINT raise KeyboardInterrupt in the block. A second one ends the draining."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the mode -----------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    run = open_run(options)
    server = Server(run, options.model, options.port)
    if options.model is None:
        say(f"serving the {server.which} model" + ("" if server.which == "merged" else ": nothing is merged yet"))
    with run.work("serve") as record:
        record |= {"which": server.which, "model": server.model}
        with suppress(KeyboardInterrupt), server:  # asked to stop: that is how a server's work ends well
            record |= {"max_model_len": server.max_model_len, "ready_after_s": server.state.ready_after_s}
            print(_example(server), flush=True)
            server.watch()
    say("stopped")
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    made = parser("serve", __doc__, "wherry serve --run demo --model merged serve.vllm.max_model_len=4096")
    made.add_argument("--model", choices=("base", "merged"), help="default: merged where there is one, else base")
    made.add_argument("--port", type=int, metavar="N", help="default: a free one")
    options = made.parse_args(arguments)
    if options.port is not None and not 0 < options.port < 65536:
        raise WherryError(f"--port {options.port} is no port", "command line", "give one from 1 to 65535")
    return options


def _example(server: Server) -> str:
    """A request that keeps the key off the command line, where every user of the machine could read it."""
    key = f"sed 's/^/Authorization: Bearer /' {shlex.quote(str(server.api_key_file))}"
    body = f'{{"model": "{server.model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"{key} | curl -sS -H @- -H 'Content-Type: application/json' \\\n  {server.url}/v1/chat/completions -d '{body}'"
    )
