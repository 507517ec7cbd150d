"""Whether the weights alone fit the GPU, asked before they are read.

Worth asking, because bitsandbytes ends the whole process from C, without a Python exception, when memory runs out while
it quantises. Of what training needs beside the weights only the least is counted: where more does not fit, torch says
so.
"""

from __future__ import annotations

from typing import Any

from wherry.errors import Exit, WherryError
from wherry.safetensors_file import Checkpoint

# Bytes a parameter in NF4: 4 bits, 8 more for each 64 parameters, 32 more for 256 of those (arXiv:2305.14314).
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# What no training goes without: cuBLAS workspaces, 16-bit copies of tensors being quantised, a smallest step. Bytes.
ROOM = 1 << 30
# Layers that bitsandbytes leaves in 16 bits: it replaces nn.Linear, and not the output head.
WHOLE = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


def weight_bytes(checkpoint: Checkpoint, tuning: str, split: bool = False) -> int:
    """Bytes of the base model's weights as training holds them: bfloat16, NF4 (qlora) or float32 (full).

    split: by ZeRO-3, which keeps full tuning's weights in bfloat16 beside a float32 copy of the optimizer.
    """
    full, total = 2 if split else 4, 0.0
    for name, (_, info) in checkpoint.tensors.items():
        count = 1
        for length in info.shape:
            count *= length
        quantised = len(info.shape) == 2 and not any(part in WHOLE for part in name.split("."))
        total += count * {"lora": 2, "full": full, "qlora": NF4 if quantised else 2}[tuning]
    return int(total)


def require(checkpoint: Checkpoint, tuning: str, parts: int, device: Any) -> None:
    """parts: ranks that the weights are split over.

    Raises WherryError (exit 4) where they and ROOM do not fit into what is free.
    """
    import torch

    needed = weight_bytes(checkpoint, tuning, split=parts > 1) // parts
    free, total = torch.cuda.mem_get_info(device)
    if needed + ROOM > free:
        raise WherryError(
            f"out of memory: the weights need {needed / 2**30:.1f} GiB on this GPU and {ROOM / 2**30:.0f} beside them, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free",
            f"{torch.cuda.get_device_name(device)}, train.tuning={tuning}, weights split over {parts}",
            "free the GPU (nvidia-smi shows who uses it), use train.tuning=qlora, or split the weights with "
            "train.sharding=zero3 over more GPUs",
            Exit.OUT_OF_MEMORY,
        )
