"""Tiny bases, adapters and run directories for the tests of merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from wherry.merge import reload, verify
from wherry.rundir import Run
from wherry.safetensors_file import checkpoint

RECIPE = "model: {name: base}\ndata: {train: rows.jsonl}\n"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_base(
    folder: Path, *, dtype: str = "float32", tied: bool = False, bias: bool = False, shard: str = "5GB"
) -> None:
    """A Llama of 2 layers, 64 wide, with random weights that are large enough for rounding to show."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=bias,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)


def make_adapter(base: Path, folder: Path, **lora: Any) -> None:
    """An adapter as PEFT saves it, every tensor of it random."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    tuned = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": LINEAR} | lora))
    torch.manual_seed(1)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    tuned.save_pretrained(folder)


def with_adapter(base: Path, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter).eval()


def make_run(
    root: Path, base: Path, adapter: Path | None, name: str = "demo", overrides: tuple[str, ...] = ()
) -> tuple[Path, list[str]]:
    """A run whose prepare and train are complete. Returns its folder, and the arguments of wherry merge."""
    recipe = root / f"{name}.yaml"
    recipe.write_text(RECIPE)
    run = Run.open(str(recipe), None, list(overrides))
    with run.work("prepare"):
        run.dir("prepare").joinpath("model").symlink_to(base)
        tokenizer = run.dir("prepare") / "tokenizer"
        tokenizer.mkdir()
        (tokenizer / "tokenizer.json").write_text("{}")
        (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
        (tokenizer / "generation_config.json").write_text('{"eos_token_id": 7}')
    with run.work("train"):
        if adapter:
            run.dir("train").joinpath("adapter").symlink_to(adapter)
    return run.path, [str(recipe), *overrides]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in checkpoint(folder).files for name, tensor in load_file(path).items()}


def reload_here(monkeypatch: Any) -> None:
    """Let merge ask transformers in this process: the same question, without the seconds that a new one needs."""

    def ask(folder: Path, what: str, trust: bool) -> None:
        if complaint := getattr(reload, what)(str(folder), trust):
            raise verify._failed(f"transformers loads it, but {complaint}", folder)

    monkeypatch.setattr(verify, "_ask_transformers", ask)


def edit_adapter(folder: Path, change: Any) -> None:
    """change(dict of tensors) in place."""
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
