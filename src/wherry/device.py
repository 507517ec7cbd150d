"""Whether there is a GPU, asked without importing torch."""

from __future__ import annotations

import os
from pathlib import Path


def has_gpu() -> bool:
    """Whether the NVIDIA driver is loaded and its device nodes are visible here (inside a container: with --nv).

    WHERRY_DEVICE=cpu says no: for runs on the CPU of a machine that has GPUs.
    """
    if os.environ.get("WHERRY_DEVICE") == "cpu":
        return False
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def quiet_cpu() -> None:
    """Tell DeepSpeed, which accelerate imports, what it would otherwise find out aloud."""
    if not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
