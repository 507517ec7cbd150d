"""A real Slurm cluster on this machine, and a checkout on it that belongs to an ordinary user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "tests/slurm/cluster.sh"
USER = "wherry-ci"
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL")


@dataclass
class Cluster:
    """folder: removed by stop. settings: variables of cluster.sh."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._script("start", check=True, timeout=300)
        self.checkout = self.folder / "checkout"
        copy_checkout(self.checkout)

    def stop(self) -> None:
        self._script("stop", check=True, timeout=120)
        self.folder.with_suffix(".out").unlink(missing_ok=True)

    def power_off(self, node: str) -> None:
        self._script("power-off", node, check=True)

    def power_on(self, node: str) -> None:
        self._script("power-on", node, check=True)

    def _script(self, *words: str, check: bool = False, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        # Files, not pipes: what a daemon inherits would keep a pipe open for ever.
        out = self.folder.with_suffix(".out")
        with out.open("w+") as file:
            done = subprocess.run(
                [SCRIPT, *words],
                env={**os.environ, **self.settings, "CLUSTER": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
            )
            file.seek(0)
            text = file.read()
        assert not check or done.returncode == 0, text
        return subprocess.CompletedProcess(done.args, done.returncode, text, "")

    # -- what a user does -------------------------------------------------------------------------------------------

    def user(self, *words: object, cwd: Path | None = None, timeout: float = 60, **env: str) -> tuple[int, str]:
        """Run a command on the login node as the ordinary user: exit code and everything it said."""
        variables = [f"{name}={value}" for name, value in env.items()]
        command = ["env", f"--chdir={cwd or self.checkout}", *variables, "timeout", f"{timeout:g}", *map(str, words)]
        done = self._script("as-user", *command, timeout=timeout + 10)
        return done.returncode, done.stdout

    def sbatch(self, *words: object, cwd: Path | None = None, **env: str) -> Job:
        code, out = self.user("sbatch", "--parsable", *words, cwd=cwd, **env)
        assert code == 0, out
        return Job(self, int(out.split()[-1]), cwd or self.checkout)


@dataclass
class Job:
    cluster: Cluster
    id: int
    folder: Path

    def show(self) -> dict[str, str]:
        _, out = self.cluster.user("scontrol", "-o", "show", "job", self.id)
        return dict(re.findall(r"(\S+?)=(\S*)", out))

    @property
    def state(self) -> str:
        return self.show().get("JobState", "unknown")

    @property
    def exit_code(self) -> int:
        """As Slurm has it."""
        return int(self.show()["ExitCode"].partition(":")[0])

    @property
    def seconds(self) -> int:
        """How long it has run, as Slurm has it: a busy machine may start it late."""
        hours, minutes, seconds = self.show()["RunTime"].split(":")
        return 3600 * int(hours) + 60 * int(minutes) + int(seconds)

    @property
    def log(self) -> str:
        logs = sorted(self.folder.glob(f"*-{self.id}.out"))
        return logs[0].read_text(errors="replace") if logs else ""

    def wait(self, *states: str, timeout: float = 60) -> str:
        """Wait for one of the states (default: any last one). Raises AssertionError with the job's log when late."""
        return self.until(lambda: (s := self.state) in (states or OVER) and s, timeout)

    def wait_for_text(self, text: str, timeout: float = 60) -> None:
        self.until(lambda: text in self.log, timeout, text)

    def until(self, condition, timeout: float, what: str = ""):  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            assert time.monotonic() < deadline, f"late: {what} {self.show()}\n{self.log}"
            time.sleep(0.2)
        return found

    def cancel(self) -> None:
        self.cluster.user("scancel", self.id)


@dataclass
class Training(Job):
    """A job of the stand-in training (training.py)."""

    @property
    def train(self) -> Path:
        return self.folder / "runs/demo/train"

    def steps(self) -> list[tuple[int, ...]]:
        """(attempt, step, ranks) of every step that was finished."""
        path = self.train / "steps.txt"
        return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, number: int, timeout: float = 60) -> None:
        self.until(lambda: any(step >= number for _, step, _ in self.steps()), timeout, f"step {number}")


def copy_checkout(to: Path) -> None:
    """What git knows and what it would add, for the ordinary user; its .venv is this checkout's."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        check=True,
    ).stdout
    to.mkdir()
    for name in names.decode().split("\0"):
        if name and (PROJECT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, to / name)
    (to / ".venv").symlink_to(PROJECT / ".venv")
    subprocess.run(["chown", "-R", f"{USER}:", to], check=True)
