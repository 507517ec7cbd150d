"""What checks look at. Tests put a folder in the place of / and an object in the place of NVML."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wherry import ranks
from wherry.doctor.jobscript import JobScript
from wherry.errors import WherryError
from wherry.plan import made
from wherry.plan.gpus import Gpus, here
from wherry.rundir import Run

# Time that the login node's checks may take for writing, in bytes written.
TRIAL_BYTES = 32 << 20


@dataclass
class Context:
    """root: what stands for /; nvml: pynvml, initialised, or None without a driver."""

    rank: ranks.Rank
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    run: Run | None = None
    script: JobScript | None = None
    gpus: Gpus | None = None
    nvml: Any = None
    node: str = field(default_factory=socket.gethostname)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """The content of a file, or nothing where it cannot be read."""
        with suppress(OSError):
            return self.path(name).read_text(errors="replace").strip()
        return ""

    @property
    def in_job(self) -> bool:
        return "SLURM_JOB_ID" in self.env

    @property
    def on_cpu(self) -> bool:
        return self.env.get("WHERRY_DEVICE") == "cpu"

    @functools.cached_property
    def plan(self) -> made.Plan | None:
        """The plan of the recipe on the job's GPUs; None without a recipe, or where the model's shape is unknown."""
        if self.run is None:
            return None
        with suppress(WherryError):
            return made.make(self.run, self._gpus())
        return None

    def _gpus(self) -> Gpus:
        if self.gpus:
            return self.gpus
        found = here()
        if self.script and self.script.gpus_per_node:
            return replace(found, nodes=self.script.nodes, per_node=self.script.gpus_per_node)
        if not self.rank.alone:
            local = self.rank.local_world_size
            return replace(found, nodes=max(1, self.rank.world_size // local), per_node=local)
        return found

    def devices(self) -> list[Any]:
        """NVML handles of the GPUs that this job uses."""
        if self.nvml is None:
            return []
        every = [self.nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self.nvml.nvmlDeviceGetCount())]
        named = self.env.get("CUDA_VISIBLE_DEVICES", "")
        indices = [int(i) for i in named.split(",") if i.strip().isdigit()]
        return [every[i] for i in indices if i < len(every)] or every

    def ask(self, function: str, *arguments: Any) -> Any:
        """An answer of NVML, or None where this GPU or driver has none."""
        try:
            return getattr(self.nvml, function)(*arguments)
        except Exception:  # NVMLError_NotSupported, or a function that this version lacks
            return None
