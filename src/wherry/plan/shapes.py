"""The shape of a decoder-only transformer with a gated MLP (Llama, Mistral, Qwen2): all that a plan needs of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherry.errors import Exit, WherryError
from wherry.files import read_json


@dataclass(frozen=True)
class Shape:
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    tied: bool
    bias: bool
    context: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear module of a layer, by its name in the model."""
        query, key = self.heads * self.head, self.kv_heads * self.head
        return {
            "self_attn.q_proj": (self.hidden, query),
            "self_attn.k_proj": (self.hidden, key),
            "self_attn.v_proj": (self.hidden, key),
            "self_attn.o_proj": (query, self.hidden),
            "mlp.gate_proj": (self.hidden, self.inner),
            "mlp.up_proj": (self.hidden, self.inner),
            "mlp.down_proj": (self.inner, self.hidden),
        }

    @property
    def layer_linear(self) -> int:
        """Parameters of a layer's linear modules, without biases."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def small(self) -> int:
        """Parameters of all norms and biases."""
        biases = (self.heads + 2 * self.kv_heads) * self.head if self.bias else 0
        return self.layers * (2 * self.hidden + biases) + self.hidden

    @property
    def embeddings(self) -> int:
        """Parameters of the input embedding and of the output head, which is the same matrix where they are tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_linear + self.embeddings + self.small

    def adapter(self, rank: int, targets: Any) -> int:
        """Parameters of a layer's LoRA factors: rank × (inputs + outputs) of each module it adapts."""
        return sum(rank * sum(self.linears[name]) for name in self.adapted(targets))

    def adapted(self, targets: Any) -> list[str]:
        """Modules of a layer that peft.LoraConfig.target_modules names: all-linear, a regular expression, or names."""
        if targets == "all-linear":
            return list(self.linears)
        if isinstance(targets, str):
            return [name for name in self.linears if re.fullmatch(targets, f"model.layers.0.{name}")]
        return [name for name in self.linears if any(name == t or name.endswith(f".{t}") for t in targets)]


def of_config(path: Path) -> Shape:
    """The shape in a config.json. Raises WherryError where it is of another kind of model."""
    config = read_json(path)
    config = {**config, **config.get("text_config", {})}
    if any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise _unlike(path, "a mixture of experts")
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return Shape(
            vocab=int(config["vocab_size"]),
            hidden=hidden,
            inner=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_dim") or hidden // heads),
            tied=bool(config.get("tie_word_embeddings", False)),
            bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
            context=int(config["max_position_embeddings"]),
        )
    except KeyError as error:
        raise _unlike(path, f"a model without {error.args[0]}") from None


def _unlike(path: Path, found: str) -> WherryError:
    return WherryError(
        f"{found} is not planned for: the arithmetic is that of Llama, Mistral and Qwen2",
        str(path),
        "measure it: wherry train --dry-run",
        Exit.USAGE,
    )
