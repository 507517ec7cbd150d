"""Which GPUs a plan is for: 3x8xH100-80 is three nodes of eight."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace

from wherry.errors import WherryError
from wherry.nearest import nearest

# type-GB → memory as the driver gives it (GiB), dense bfloat16 (TFLOP/s), memory bandwidth (TB/s), NVLink to the other
# GPUs of a node (GB/s each way; PCIe where there is none), from NVIDIA's data sheets.
TYPES: dict[str, tuple[float, float, float, float]] = {
    "H100-80": (79.6, 989, 3.35, 450),
    "H100PCIE-80": (79.6, 756, 2.0, 64),
    "H100-94": (93.6, 835, 3.9, 300),
    "H200-141": (140.4, 989, 4.8, 450),
    "GH200-96": (95.5, 989, 4.0, 450),
    "B200-180": (178.4, 2250, 8.0, 900),
    "A100-80": (79.3, 312, 2.0, 300),
    "A100-40": (39.4, 312, 1.55, 300),
    "A40-48": (44.4, 150, 0.7, 32),
    "L40S-48": (44.4, 362, 0.86, 32),
    "A6000-48": (47.4, 155, 0.77, 32),
    "RTX4090-24": (23.5, 165, 1.0, 32),
    "V100-32": (31.7, 125, 0.9, 150),
}


@dataclass(frozen=True)
class Gpus:
    """memory: GiB of one GPU; tflops: dense 16-bit peak; bandwidth: TB/s of its memory; link: GB/s within a node."""

    nodes: int
    per_node: int
    name: str
    memory: float
    tflops: float
    bandwidth: float
    link: float
    origin: str

    @property
    def count(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.per_node} × {self.name} ({self.memory:.1f} GiB each)"


def parse(text: str) -> Gpus:
    """NODESxGPUSxTYPE-GB, with the counts left out from the left. Raises WherryError (exit 2) where it is none."""
    found = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?([A-Za-z][A-Za-z0-9]*)(?:-(\d+))?", text)
    if not found:
        raise _unknown(text)
    nodes, per_node, name, gigabytes = int(found[1] or 1), int(found[2] or 1), found[3].upper(), found[4]
    same = [key for key in TYPES if key.partition("-")[0] == name]
    if not same or not nodes * per_node:
        raise _unknown(text)
    key = f"{name}-{gigabytes}" if gigabytes else same[0]
    memory, tflops, bandwidth, link = TYPES.get(key, TYPES[same[0]])
    if key not in TYPES:  # a size that is not in the table: what is sold as GB, less what the driver keeps
        memory = int(gigabytes) * 0.93
    return Gpus(nodes, per_node, key, memory, tflops, bandwidth, link, "--gpus")


def here() -> Gpus:
    """This machine's GPUs (of all nodes of its job), else eight H100, said so in its origin."""
    with suppress(Exception):  # no driver, or no NVML: then there is nothing here to plan for
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        sold_as = str(pynvml.nvmlDeviceGetName(device)).upper().replace(" ", "")
        memory = pynvml.nvmlDeviceGetMemoryInfo(device).total / 2**30
        like = [key for key in TYPES if key.partition("-")[0] in sold_as]
        key = min(like, key=lambda known: abs(TYPES[known][0] - memory), default="H100-80")
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        _, tflops, bandwidth, link = TYPES[key]
        return Gpus(nodes, pynvml.nvmlDeviceGetCount(), key, memory, tflops, bandwidth, link, "this machine")
    return replace(parse("1x8xH100-80"), origin="assumed: say which with --gpus 3x8xH100-80")


def _unknown(text: str) -> WherryError:
    suggestion = nearest(text.rpartition("x")[2].upper(), TYPES)
    return WherryError(
        f"--gpus {text}: no such GPUs", "command line", f"{suggestion}NODESxGPUSxTYPE-GB; types: {', '.join(TYPES)}"
    )
