"""What training and merging need of the nodes: host memory, and room on the shared file system. Bytes."""

from __future__ import annotations

from wherry.plan.gpus import Gpus
from wherry.plan.memory import Part
from wherry.plan.setting import Setting
from wherry.plan.shapes import Shape

PROCESS = 4 << 30  # a rank's Python with torch, transformers and CUDA; seen, not computed
READ_AHEAD = 4  # tensors that transformers reads at a time


def host(shape: Shape, setting: Setting, gpus: Gpus) -> Part:
    """Memory of the node that needs most of it, the first.

    Weights are read through mmap: pages of files, which the kernel takes back, are not counted. Under ZeRO-3 every
    checkpoint gathers what is trained in the first rank's memory, in 16 bits: for full tuning that is the whole model
    (frozen weights pass layer by layer and are left out: transformers asks DeepSpeed for exclude_frozen_parameters).
    """
    ranks = min(setting.ranks, gpus.per_node)
    tensor = 2.0 * max(shape.vocab * shape.hidden, shape.inner * shape.hidden)
    loading = READ_AHEAD * tensor * (1 if setting.sharded else ranks)
    gathered = 2.0 * setting.trainable(shape) if setting.sharded else 0.0
    how = f"{ranks} ranks × {PROCESS >> 30} GiB"
    how += f" + {gathered / 2**30:.1f} GiB: what is trained, gathered for each checkpoint" if gathered else ""
    how += f" + {loading / 2**30:.1f} GiB: {READ_AHEAD} of the largest tensors at a time"
    return Part(ranks * PROCESS + gathered + loading, how)


def checkpoints(shape: Shape, setting: Setting, kept: int) -> Part:
    """kept: train.args.save_total_limit. One more is there while it is written, before the oldest is removed."""
    count = setting.trainable(shape)
    size = setting.trainable_size + setting.state_size
    return Part(
        (kept + 1) * count * size,
        f"({kept} kept + 1 being written) × {count:,} parameters × {size:.3g} B (weights and optimizer states)",
    )


def merged(shape: Shape, setting: Setting) -> Part:
    """merge/model: as large as the base. Full tuning has nothing to merge; its model is written by train."""
    size = 2 if setting.tuning != "full" or setting.sharded else 4
    return Part(float(size * shape.parameters), f"{shape.parameters:,} parameters × {size} B")


def merge_memory(shape: Shape, setting: Setting) -> Part:
    """merge works through the base tensor by tensor, in float32, with the adapter in memory."""
    tensor = shape.inner * shape.hidden
    adapter = setting.trainable(shape) * setting.trainable_size if setting.tuning != "full" else 0
    return Part(
        3 * 4.0 * tensor + adapter + (1 << 30),
        f"3 × {tensor:,} × 4 B (one tensor, its update, their sum) + {adapter / 2**30:.1f} GiB of adapter + 1 GiB",
    )
