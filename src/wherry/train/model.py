"""What training reads: the prepared model and data, checked once more against the token contract."""

from __future__ import annotations

from typing import Any

from wherry.device import has_gpu
from wherry.errors import Exit, WherryError
from wherry.ranks import Rank
from wherry.rundir import Run
from wherry.safetensors_file import checkpoint
from wherry.train import memory
from wherry.train.config import quantization_config


def load(run: Run, rank: Rank) -> Any:
    """The base model on this process's device, quantised as it is read for qlora; 16-bit weights in bfloat16."""
    import torch

    recipe = run.recipe
    folder = run.dir("prepare") / "model"
    sharded = recipe.train.sharding == "zero3"
    if has_gpu():
        # 4-bit weights are split only after all of them were read.
        parts = rank.world_size if sharded and recipe.train.tuning != "qlora" else 1
        memory.require(checkpoint(folder), recipe.train.tuning, parts, torch.cuda.current_device())
    if sharded:
        import deepspeed

        # Unless it knows the ranks by now, it splits weights for a world of one: it does not engage.
        deepspeed.init_distributed(dist_backend="nccl" if has_gpu() else "gloo")
    dtype = torch.bfloat16 if recipe.train.tuning != "full" else torch.float32
    return _from_pretrained(run, dtype, quantization_config(recipe.train))


def load_reference(run: Run) -> Any:
    """The frozen model that full tuning by preference is compared with: bfloat16, split as the trained one is."""
    import torch

    return _from_pretrained(run, torch.bfloat16, None).eval().requires_grad_(False)


def _from_pretrained(run: Run, dtype: Any, quantization: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    sharded = run.recipe.train.sharding == "zero3"
    return AutoModelForCausalLM.from_pretrained(
        run.dir("prepare") / "model",
        dtype=dtype,
        quantization_config=quantization,
        # Under ZeRO-3 each parameter is split as it is read; any device map would undo that.
        device_map=None if sharded else {"": torch.cuda.current_device() if has_gpu() else "cpu"},
        trust_remote_code=run.recipe.model.trust_remote_code,
    )


def dataset(run: Run, name: str) -> Any:
    """Rows of token ids, mapped from prepare's Arrow file: no copy in memory, shared by all ranks."""
    from datasets import Dataset

    return Dataset.from_file(str(run.dir("prepare") / f"{name}.arrow"))


def added_tokens(run: Run) -> dict[str, list[int]]:
    """By module with a row for each token: the rows that no training has seen yet (model.add_tokens)."""
    from wherry.prepare.grow import token_modules

    ids = run.manifest()["contract"].get("added_token_ids")
    return dict.fromkeys(token_modules(checkpoint(run.dir("prepare") / "model")), ids) if ids else {}


def check_contract(run: Run) -> None:
    """Raises WherryError (exit 3) where the model or tokenizer is not the one that prepare saw."""
    from transformers import AutoTokenizer

    from wherry.prepare.tokens import check_contract, contract

    agreed = run.manifest()["contract"]
    tokenizer = AutoTokenizer.from_pretrained(run.dir("prepare") / "tokenizer")
    now = contract(
        tokenizer,
        run.dir("prepare") / "model",
        agreed["eos_token_ids"],
        agreed["largest_id"],
        agreed["max_length"],
    )
    for key, value in now.items():
        if value != agreed[key]:
            raise WherryError(
                f"{key} was {agreed[key]!r} in prepare and is {value!r} now",
                str(run.dir("prepare")),
                f"remove {run.dir('prepare')} and prepare again",
                Exit.PREFLIGHT,
            )
    check_contract(now)
