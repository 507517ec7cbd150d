"""What the container tests build with and ask: the machine, the image, the SIF."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
HOST = PROJECT / "tests/containers/host.sh"
BASE = "localhost/debian:bookworm-slim"
REVISION = "0123456789abcdef0123456789abcdef01234567"
ENTRYPOINT = "/opt/wherry-src/entrypoints/entrypoint.sh"
VERIFY = "/opt/wherry-src/containers/verify.py"
NEEDED_GB = {"image": 30, "sif": 45}
"""Free before the first build, and what the SIFs add: archive, root file system, two SIFs."""

IMAGE_VARIABLES = "PATH LANG PYTHONNOUSERSITE NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES WHERRY_REVISION".split()
OUR_LABELS = ("org.opencontainers.image.", "wherry.")


def run(
    command: list[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 2400
) -> subprocess.CompletedProcess[str]:
    """Run to the end, whatever the exit code: what a test asserts on."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, env=env, cwd=cwd, timeout=timeout, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def good(done: subprocess.CompletedProcess[str]) -> str:
    """The output of a command that must succeed."""
    assert done.returncode == 0, f"{done.args} → {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def free_gb(path: Path) -> float:
    return shutil.disk_usage(path).free / 1e9


def require_space(request: pytest.FixtureRequest, path: Path, key: str) -> None:
    free, needed = free_gb(path), NEEDED_GB[key]
    if free < needed:
        why = f"{path} has {free:.0f} GB free, the {key} tests need {needed}: free some, or set WHERRY_CI"
        say(request, f"SKIPPED ALOUD: {why}")
        pytest.skip(f"LOUD: {why}")


def say(request: pytest.FixtureRequest, text: str) -> None:
    """Past pytest's capture: numbers that a reader of CI's log wants to see."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n  [containers] {text}", flush=True)


@dataclass
class Host:
    """This machine as host.sh prepared it."""

    root: Path
    checkout: Path
    environment: dict[str, str] = field(default_factory=dict)

    def as_root(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return run(list(command), env=os.environ | self.environment | variables)

    def podman(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.as_root("podman", *arguments)

    def as_user(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run as the ordinary user, with a fresh login's environment and these variables."""
        environment = os.environ | self.environment | variables | {"KEEP": " ".join(variables)}
        return run([HOST, "as-user", *command], env=environment, cwd=self.checkout)


class Artifact:
    """An image or a SIF: what it holds, and how a command runs in it."""

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        raise NotImplementedError

    def entrypoint(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        raise NotImplementedError

    @cached_property
    def freeze(self) -> str:
        return good(self.inside("python", VERIFY, "--freeze"))

    @cached_property
    def environment(self) -> dict[str, str]:
        found = json.loads(good(self.inside("python", "-c", "import json, os; print(json.dumps(dict(os.environ)))")))
        return {name: found.get(name, "") for name in IMAGE_VARIABLES}

    @cached_property
    def says(self) -> dict[str, tuple[int, str]]:
        """What the entrypoint answers, with its exit codes."""
        answers = {}
        for word in ("version", "--help", "wherry --help", "trian", "prepare", "python --version", "false"):
            done = self.entrypoint(*word.split())
            answers[word] = (done.returncode, done.stdout)
        return answers

    @cached_property
    def files(self) -> str:
        """Every file of the project in it, with its hash."""
        command = "cd /opt/wherry-src && find . -type f -not -name '*.pyc' | sort | xargs sha256sum"
        return good(self.inside("bash", "-c", command))


@dataclass
class Image(Artifact):
    host: Host
    tag: str
    build_log: str
    seconds: float

    def locked(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """podman run, locked down as far as it goes; arguments: more options, the tag, the command."""
        return self.host.podman(
            *("run", "--rm", "--no-healthcheck", "--network", "none", "--read-only", "--tmpfs", "/tmp"),
            *("--user", "12345:12345", "--cap-drop", "all", "--security-opt", "no-new-privileges"),
            *arguments,
        )

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.locked("--entrypoint", "", self.tag, *command)

    def entrypoint(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.locked(self.tag, *arguments)

    @cached_property
    def configuration(self) -> dict[str, object]:
        found = json.loads(good(self.host.podman("image", "inspect", self.tag)))[0]
        assert isinstance(found, dict)
        return found

    @cached_property
    def labels(self) -> dict[str, str]:
        labels = self.configuration["Labels"]
        assert isinstance(labels, dict)
        return {name: value for name, value in labels.items() if name.startswith(OUR_LABELS)}


@dataclass
class Sif(Artifact):
    host: Host
    path: Path

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.host.as_user("apptainer", "exec", "--containall", "--cleanenv", self.path, *command)

    def entrypoint(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.host.as_user("apptainer", "run", "--containall", "--cleanenv", self.path, *arguments)

    @cached_property
    def labels(self) -> dict[str, str]:
        found = json.loads(good(self.host.as_user("apptainer", "inspect", "--json", self.path)))
        labels = found["data"]["attributes"]["labels"]
        return {name: value for name, value in labels.items() if name.startswith(OUR_LABELS)}


def copy_checkout(target: Path) -> None:
    """The files that git knows or does not ignore, readable for everyone: the tests' own ordinary user builds too."""
    shutil.rmtree(target, ignore_errors=True)
    listed = good(run(["git", "-C", PROJECT, "ls-files", "-co", "--exclude-standard"])).splitlines()
    for name in listed:
        if (PROJECT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, target / name)
    good(run(["chmod", "-R", "a+rX", target]))


def build_smoke(host: Host, checkout: Path) -> tuple[str, float]:
    """containers/image.sh smoke, as `make smoke` calls it: its log, and the seconds it took."""
    started = time.monotonic()
    variables = {"ENGINE": "podman", "BASE_IMAGE": BASE, "BUILD_OPTIONS": "--network host", "REVISION": REVISION}
    done = host.as_root(checkout / "containers/image.sh", "smoke", **variables, OUT=str(host.root / "out"))
    good(done)
    return done.stdout + done.stderr, time.monotonic() - started


def build_sif(host: Host, name: str, command: list[str | Path], **variables: str) -> Path:
    """Run a command that leaves wherry.sif in $OUT, as the ordinary user, and give it a name."""
    out = host.root / "home/out"
    place = host.root / "home/tmp"
    places = {"OUT": str(out), "APPTAINER_TMPDIR": str(place), "APPTAINER_CACHEDIR": str(place / "cache")}
    good(host.as_user(*command, **places, MKSQUASHFS_ARGS="-comp lz4", **variables))
    sif = out.with_name(f"{name}.sif")
    (out / "wherry.sif").rename(sif)
    shutil.rmtree(place, ignore_errors=True)
    return sif
