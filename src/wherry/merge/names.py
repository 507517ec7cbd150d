"""What the adapter calls the base's tensors, where transformers gives them other names than the checkpoint has.

Since its version 5 transformers renames tensors while it loads a model, and fuses the experts of a mixture into one
parameter. An adapter speaks of the model; the merge writes the checkpoint's own layout, as save_pretrained does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wherry.merge.adapter import Adapter
from wherry.safetensors_file import Checkpoint


@dataclass(frozen=True)
class Slice:
    """A tensor of the base that is one expert's part of a fused parameter: rows from, to."""

    tensor: str
    expert: int
    rows: tuple[int, int]


@dataclass(frozen=True)
class Fused:
    """A parameter [experts, rows, columns] of the model, and the tensors that it is made of."""

    experts: int
    rows: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Names:
    """called: tensor of the base → its name in the model. fused: parameter of the model → what it is made of.

    order: parameters of the model, by the module that holds them, in the order in which PEFT wraps them.
    """

    called: dict[str, str] = field(default_factory=dict)
    fused: dict[str, Fused] = field(default_factory=dict)
    order: dict[str, list[str]] = field(default_factory=dict)


def resolve(base: Checkpoint, adapter: Adapter, trust_remote_code: bool) -> Names:
    """Empty where the base has every tensor that the adapter speaks of: transformers is asked only where it must be."""
    if all(name in base.tensors or name == "lm_head.weight" for name in adapter.keys):
        return Names()
    try:
        model = empty_model(base.folder, trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError):  # a model that transformers does not know renames nothing
        return Names()
    return _of(model, base)


def empty_model(folder: Path, trust_remote_code: bool = False) -> Any:
    """The transformers model of a folder, without memory for its weights (on the meta device)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _of(model: Any, base: Checkpoint) -> Names:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = get_model_conversion_mapping(model)
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    renamings = [one for one in conversions if not isinstance(one, WeightConverter)]
    state = model.state_dict()
    called: dict[str, str] = {}
    sources: dict[str, list[tuple[str, int]]] = defaultdict(list)  # parameter → (tensor, which source of its converter)
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    for tensor in base.tensors:
        name, pattern = rename_source_key(tensor, renamings, converters, model.base_model_prefix, state)
        if pattern is None:
            called[tensor] = name
        elif _stacks_experts(by_pattern[pattern]):
            sources[name].append((tensor, by_pattern[pattern].source_patterns.index(pattern)))
    fused = {
        name: _fused(tuple(state[name].shape), tensors)
        for name, tensors in sources.items()
        if name in state and not getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False)
    }
    order = {
        name: [parameter for parameter, _ in module.named_parameters(recurse=False)]
        for name, module in model.named_modules()
    }
    return Names(called, fused, order)


def _stacks_experts(converter: Any) -> bool:
    """Whether a conversion only stacks experts, and puts projections (gate and up) one below the other."""
    steps = [(type(step).__name__, step.dim) for step in converter.operations if hasattr(step, "dim")]
    stacked = [("MergeModulelist", 0)]
    return len(steps) == len(converter.operations) and steps in (stacked, [*stacked, ("Concatenate", 1)])


def _fused(shape: tuple[int, ...], tensors: list[tuple[str, int]]) -> Fused:
    experts, rows, _ = shape
    height = rows // len({source for _, source in tensors})
    slices = [Slice(tensor, _expert(tensor), (source * height, (source + 1) * height)) for tensor, source in tensors]
    return Fused(experts, rows, tuple(slices))


def _expert(tensor: str) -> int:
    """The number of the expert: the last number in the name (model.layers.3.mlp.experts.17.up_proj.weight)."""
    return int(re.findall(r"\.(\d+)\.", tensor)[-1])
