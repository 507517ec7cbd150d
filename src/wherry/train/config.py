"""The libraries' configurations, made from the recipe and checked by the libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from wherry.device import has_gpu
from wherry.errors import WherryError
from wherry.recipe.schema import Train
from wherry.rundir import Run

# DeepSpeed's own names; "auto" takes the trainer's value. The whole weights are gathered once, when they are saved.
ZERO3: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        # By the model's width: what is smaller than ten of its vectors (norms) stays whole on every rank.
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "contiguous_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_allow_untested_optimizer": True,
}


def training_args(run: Run, universal: bool = False, head_rows: bool = False) -> Any:
    """trl.SFTConfig or trl.DPOConfig.

    universal: the checkpoint to go on from is one (world.py); head_rows: rows of the output head are trained.

    Raises WherryError (exit 2) with TRL's own words where it refuses a value.
    """
    import trl

    objective = run.recipe.train.objective
    args = dict(run.recipe.train.args)
    if "max_length" not in args:
        args["max_length"] = run.manifest()["contract"]["max_length"]
    args.setdefault("report_to", "none")
    args.setdefault("save_total_limit", 2)
    if run.recipe.train.sharding == "zero3":
        args["deepspeed"] = ZERO3 | ({"checkpoint": {"load_universal": True}} if universal else {})
    if not has_gpu():
        # Ranks on a CPU would be on "cpu:0", for which torch.load restores no optimizer.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
        args |= {"use_cpu": True, "dataloader_pin_memory": False}
    if head_rows:
        # Losses that never hold all logits read the head's weight itself, past the rows that PEFT trains beside it.
        if args.get("use_liger_kernel") or args.get("loss_type", "nll") == "chunked_nll":
            raise WherryError(
                "the rows of added tokens in the output head would not be trained by this loss",
                "train.args",
                "remove use_liger_kernel and loss_type, or model.add_tokens",
            )
        if objective == "sft":
            args.setdefault("loss_type", "nll")
    if objective == "sft" and not args.get("packing"):
        # Nothing is left to do: rows are tokenised, masked and short enough.
        args["dataset_kwargs"] = {"skip_prepare_dataset": True}
    config_class = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}[objective]
    return _checked("train.args", config_class, output_dir=str(run.dir("train") / "checkpoints"), **args)


def lora_config(train: Train, added: dict[str, list[int]] | None = None) -> Any:
    """peft.LoraConfig, or None for train.tuning: full.

    added: by module, ids of tokens that the model has never seen. Their rows are trained, each by itself, unless the
    recipe says what becomes of the embedding.
    """
    from peft import LoraConfig

    if train.tuning == "full":
        return None
    values = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"} | train.lora
    if added and not values.keys() & {"trainable_token_indices", "modules_to_save"}:
        values["trainable_token_indices"] = added
    return _checked("train.lora", LoraConfig, task_type="CAUSAL_LM", **values)


def quantization_config(train: Train) -> Any:
    """transformers.BitsAndBytesConfig: NF4, double quantisation, unless the recipe says otherwise; None if unused."""
    import torch
    from transformers import BitsAndBytesConfig

    if train.tuning != "qlora":
        return None
    values = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }
    if train.sharding == "zero3":  # all that is gathered in one buffer must be of one type
        values["bnb_4bit_quant_storage"] = torch.bfloat16
    return _checked("train.quantization", BitsAndBytesConfig, **(values | train.quantization))


def _checked(key: str, make: Callable[..., Any], **values: Any) -> Any:
    with library_refusals(key):
        return make(**values)


@contextmanager
def library_refusals(key: str) -> Iterator[None]:
    """What TRL, PEFT and transformers raise for a value that they do not take: exit 2 in their own words."""
    try:
        yield
    except (TypeError, ValueError, ImportError) as error:
        raise WherryError(" ".join(str(error).split())[:300], key, f"correct {key} (docs/recipe.md)") from error
