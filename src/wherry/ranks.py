"""Which process of a distributed run this is, and whether it sees the GPU that it is to use.

Ranks are derived in one place, entrypoints/train.sh, and read here from torchrun's environment: RANK, LOCAL_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE. Without them this is the only process.

`python -m wherry.ranks` prints what this rank sees as JSON, and ends with exit 3 where it would not work.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from wherry.device import has_gpu
from wherry.errors import Exit, WherryError, run


@dataclass(frozen=True)
class Rank:
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world_size == 1


def current() -> Rank:
    """Raises WherryError (exit 3) where torchrun's variables are there in part, or are no numbers."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    given = [os.environ.get(name) for name in names]
    if given[0] is None:
        return Rank(0, 0, 1, 1)
    try:
        return Rank(*(int(value) for value in given))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seen = ", ".join(f"{n}={v}" for n, v in zip(names, given, strict=True))
        raise WherryError(
            f"incomplete launch: {seen}",
            "environment",
            "start training through slurm/train.sh or torchrun",
            Exit.PREFLIGHT,
        ) from None


def visible_gpus() -> int:
    """GPUs that this process may use: what CUDA_VISIBLE_DEVICES names, else device nodes, else what Slurm says."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([device for device in named.split(",") if device.strip() not in ("", "-1", "NoDevFiles")])
    nodes = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    return len(nodes) or int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)


def check(rank: Rank) -> None:
    """Refuse, before any weight is read, a rank that cannot see or not use its GPU. Raises WherryError (exit 3)."""
    check_visible(rank)
    job = int(os.environ.get("WHERRY_GPUS_PER_NODE") or 0)
    if job and os.environ.get("WHERRY_DEVICE") != "cpu" and not has_gpu():
        raise WherryError(
            f"the job has {job} GPU{'s' * (job != 1)} on this node, and this container can use none",
            f"rank {rank.rank} on {socket.gethostname()}: no /dev/nvidiactl",
            "see that nvidia-smi works on the node (the driver), and that apptainer was given --nv; "
            "to train on the CPU: WHERRY_DEVICE=cpu",
            Exit.PREFLIGHT,
        )


def check_visible(rank: Rank) -> None:
    """Refuse a rank that sees fewer GPUs than its local rank needs. Raises WherryError (exit 3).

    WHERRY_GPUS_PER_NODE: GPUs that the job has on this node, as the batch shell (which sees all of them) counted.
    WHERRY_DEVICE=cpu: nothing is asked of GPUs.
    """
    if os.environ.get("WHERRY_DEVICE") == "cpu":
        return
    seen, job = visible_gpus(), int(os.environ.get("WHERRY_GPUS_PER_NODE") or 0)
    wanted = max(rank.local_world_size if not rank.alone or job else 0, job)
    if seen >= wanted:
        return
    who = f"rank {rank.rank} (local rank {rank.local_rank} of {rank.local_world_size}) on {socket.gethostname()}"
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = f"{who}: CUDA_VISIBLE_DEVICES={'(unset)' if named is None else named}"
    raise WherryError(
        f"this task sees {seen} GPU{'s' * (seen != 1)}, the node's share of the job is {wanted}",
        where,
        _cure(),
        Exit.PREFLIGHT,
    )


def end(code: int) -> None:
    """End this process at once if it is one of several ranks.

    Threads of gloo and DeepSpeed that still listen when C++ tears down its statics abort the process (SIGABRT), after
    all work is done: the exit code that says "stopped, can be resumed" would be lost.
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _cure() -> str:
    """Name the Slurm option that hid the GPUs, as far as the environment shows it."""
    if per_task := os.environ.get("SLURM_GPUS_PER_TASK"):
        return f"replace --gpus-per-task={per_task} by --gpus-per-node=N: every task must see all GPUs of its node"
    if "SLURM_JOB_ID" in os.environ:
        return (
            "ask for the GPUs with --gpus-per-node=N and leave out --gpus-per-task and --gpu-bind "
            "(or give srun --gpu-bind=none)"
        )
    return "start as many processes a node as it has GPUs, and leave CUDA_VISIBLE_DEVICES unset"


def main() -> int:
    rank = current()
    check_visible(rank)
    print(json.dumps(asdict(rank) | {"host": socket.gethostname(), "visible_gpus": visible_gpus()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
