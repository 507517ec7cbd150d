"""Save what was learned, and read it back before it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wherry.errors import Exit, WherryError
from wherry.files import atomic_directory
from wherry.ranks import Rank
from wherry.rundir import Run


def save(trainer: Any, run: Run, rank: Rank) -> None:
    """Write train/adapter (or train/model for full tuning). Raises WherryError (exit 6) where it is not sound.

    All ranks take part: under ZeRO-3 each holds a part of what the first one writes.
    """
    full = run.recipe.train.tuning == "full"
    if not rank.is_main:
        trainer.save_model(str(run.dir("train") / "unused"))
        return
    with atomic_directory(run.dir("train") / ("model" if full else "adapter")) as part:
        trainer.save_model(str(part))
        (part / "training_args.bin").unlink(missing_ok=True)  # a pickle: nothing later reads it
        if not full:
            check_adapter(part / "adapter_model.safetensors", trainer.model)


def check_adapter(path: Path, model: Any, learned: bool = True) -> None:
    """Read an adapter back: a tensor for each that was trained, none empty, all finite, and B not zero (learned).

    Raises WherryError (exit 6).
    """
    from safetensors.torch import load_file

    expected = sum(p.requires_grad for p in model.parameters())
    # A LoRA on an embedding is saved with the embedding itself (….base_layer.weight), which was not trained.
    tensors = {name: tensor for name, tensor in load_file(path).items() if ".base_layer." not in name}
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    moved = any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name or "lora_A" not in name)
    if len(tensors) != expected or empty:
        what = f"the saved adapter has {len(tensors)} tensors, {len(empty)} of them empty; {expected} were trained"
    elif broken:
        what = f"{broken[0]} of the saved adapter is not finite"
    elif learned and not moved:
        what = "every B of the saved adapter is zero: nothing was learned"
    else:
        return
    raise WherryError(what, str(path), "lower train.args.learning_rate, or resume from a checkpoint", Exit.VERIFICATION)
