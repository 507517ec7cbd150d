"""Random PEFT configurations on tiny models of several families: the merged model is PEFT's, bit by bit.

Where the order of a sum differs (a norm over rows that are read in pieces), a number may differ by one unit in the
last place; how many do is printed (pytest -rP).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_models import make_run, reload_here, with_adapter
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from wherry import merge
from wherry.merge import lora, plan

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = SIZES | {"intermediate_size": 96, "tie_word_embeddings": False}
EXPERTS = SIZES | {"intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[PreTrainedConfig, torch.dtype]] = {
    "llama": (LlamaConfig(**LLAMA), torch.bfloat16),
    "llama in fp16": (LlamaConfig(**LLAMA), torch.float16),
    "llama in fp32": (LlamaConfig(**LLAMA), torch.float32),
    "llama with biases": (LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True), torch.bfloat16),
    "llama, tied": (LlamaConfig(**LLAMA | {"tie_word_embeddings": True}), torch.bfloat16),
    "gpt2": (GPT2Config(vocab_size=160, n_embd=64, n_layer=2, n_head=4, n_positions=64), torch.bfloat16),
    "qwen3_moe": (Qwen3MoeConfig(**EXPERTS, head_dim=16, tie_word_embeddings=False), torch.bfloat16),
    "mixtral": (MixtralConfig(**LLAMA, num_local_experts=4), torch.bfloat16),
}
BATCHES, BATCH = 15, 8


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bases")
    for name, (config, dtype) in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.2)
        model.to(dtype).save_pretrained(root / name, max_shard_size="100KB" if name == "llama" else "5GB")
    return root


def draw(rng: random.Random, family: str) -> dict[str, Any]:
    """Arguments of peft.LoraConfig that PEFT accepts for a family, and merges rightly."""
    given: dict[str, Any] = {
        "r": rng.randint(1, 9),
        "lora_alpha": rng.choice([1, 3, 16, 40]),
        "use_rslora": rng.random() < 0.3,
        "use_dora": rng.random() < 0.3,
        "init_lora_weights": rng.choice([True, "gaussian"]),
    }
    if family == "gpt2":  # its head is tied to its embedding: merge_and_unload itself adds to both
        given["target_modules"] = rng.choice([["c_attn"], ["c_attn", "c_proj", "c_fc"], "all-linear"])
        given["modules_to_save"] = rng.choice([None, ["ln_f"]])
        return given
    if family in ("qwen3_moe", "mixtral"):
        if rng.random() < 0.7:
            given |= {"target_modules": "all-linear", "use_dora": False}  # PEFT's experts know no DoRA
        else:
            given["target_modules"] = rng.sample(ATTENTION, 2)
        return given
    tied = family == "llama, tied"
    given["target_modules"] = rng.choice([rng.sample(DENSE, rng.randint(1, 7)), "all-linear", DENSE])
    if rng.random() < 0.4:
        name = rng.choice(DENSE)
        given["rank_pattern"] = {rng.choice([name, rf"layers\.1\..*{name}"]): rng.randint(1, 12)}
        given["alpha_pattern"] = {rng.choice(DENSE): rng.randint(1, 30)}
    if rng.random() < 0.2:
        given["layers_to_transform"] = [rng.randint(0, 1)] if given["target_modules"] != "all-linear" else None
    extra = rng.choice(["nothing", "embedding", "head", "norms", "save embedding", "tokens", "head tokens"])
    if tied and extra not in ("nothing", "norms", "tokens"):
        extra = "tokens"  # what merge_and_unload does to a tied weight is compared in test_merge_peft.py
    if isinstance(given["target_modules"], list) and extra in ("embedding", "head"):
        given["target_modules"] = [*given["target_modules"], "embed_tokens" if extra == "embedding" else "lm_head"]
        given.pop("layers_to_transform", None)
    given["modules_to_save"] = {"norms": ["norm"], "save embedding": ["embed_tokens"]}.get(extra)
    if "tokens" in extra:
        rows = rng.sample(range(160), rng.randint(1, 5))
        given["trainable_token_indices"] = rows if extra == "tokens" else {"embed_tokens": rows, "lm_head": rows[:1]}
    if family == "llama with biases":
        given["bias"] = rng.choice(["none", "all", "lora_only"])
        if not given["use_dora"] and "embedding" not in extra and extra != "head":
            given["lora_bias"] = rng.random() < 0.5 and given["bias"] == "none"
    return given


def save_adapter(base: Path, folder: Path, given: dict[str, Any], seed: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    tuned = get_peft_model(model, LoraConfig(**given))
    torch.manual_seed(seed)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += (0.2 * torch.randn(parameter.shape)).to(parameter.dtype)
    tuned.save_pretrained(folder)


def ulps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Distance in units in the last place, of two tensors of one floating-point dtype."""
    kind = {2: torch.int16, 4: torch.int32}[one.itemsize]

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.contiguous().view(kind).long()
        return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)

    return (ordered(one) - ordered(other)).abs()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_merged_model_is_that_of_peft(
    bases: Path, tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERRY_RUNS", str(tmp_path / "runs"))
    reload_here(monkeypatch)
    # Pieces and strides so small that these models have many, as large ones do.
    monkeypatch.setattr(plan, "PIECE_BYTES", 8 << 10)
    monkeypatch.setattr(lora, "STRIDE", 1 << 10)
    numbers = differing = 0
    for i in range(batch * BATCH, (batch + 1) * BATCH):
        rng = random.Random(i)
        family = sorted(FAMILIES)[i % len(FAMILIES)]
        given = draw(rng, family)
        save_adapter(bases / family, tmp_path / f"adapter-{i}", given, seed=i)
        run, arguments = make_run(tmp_path, bases / family, tmp_path / f"adapter-{i}", name=f"run-{i}")
        assert merge.main(arguments) == 0
        expected = with_adapter(bases / family, tmp_path / f"adapter-{i}").merge_and_unload().state_dict()
        found = AutoModelForCausalLM.from_pretrained(run / "merge/model", dtype="auto").state_dict()
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name].dtype == expected[name].dtype, (family, given, name)
            apart = ulps(found[name], expected[name])
            assert apart.max() <= 1, (family, given, name, int(apart.max()), int((apart > 0).sum()))
            numbers += apart.numel()
            differing += int((apart > 0).sum())
    print(f"{differing} of {numbers} numbers differ by one unit in the last place")
