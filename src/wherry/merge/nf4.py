"""The weights that a QLoRA run really trained on: bitsandbytes' quantisation to 4 bits and back, on the CPU, by rows.

QLoRA: arXiv:2305.14314. Numbers are quantised 64 at a time by their largest magnitude (absmax); with double
quantisation the absmax of a whole tensor, less their mean, are quantised to 8 bits, 256 at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.nn import Linear4bit

from wherry.errors import WherryError
from wherry.merge.plan import ROWS, Target
from wherry.merge.stream import PIECE_BYTES, Source, load_rows
from wherry.rundir import Run

LOADED = torch.bfloat16  # in which train loads the base before it is quantised


@dataclass(frozen=True)
class Nf4:
    """A weight as bitsandbytes.nn.Linear4bit holds it. blocksize: numbers that share an absmax."""

    source: Source
    quant_type: str
    double: bool
    blocksize: int = 64

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows begin to end after the round trip, in bfloat16. begin · columns is a multiple of blocksize."""
        rows = load_rows(self.source, begin, end).to(LOADED)
        first = begin * rows.shape[1] // self.blocksize
        packed, state = bnb.quantize_4bit(rows, blocksize=self.blocksize, quant_type=self.quant_type)
        state.absmax = absmax(self)[first : first + state.absmax.numel()]
        return bnb.dequantize_4bit(packed, state)


@functools.lru_cache(maxsize=4)
def absmax(weight: Nf4) -> torch.Tensor:
    """The absmax of every block of a weight as dequantisation sees them, in fp32: 1/16 of a number a number."""
    height, width = weight.source.info.shape
    step = max(1, PIECE_BYTES // (2 * width) // ROWS) * ROWS
    found = []
    for begin in range(0, height, step):
        numbers = load_rows(weight.source, begin, min(begin + step, height)).to(LOADED).float().abs_().flatten()
        padding = -numbers.numel() % weight.blocksize  # at the very end alone
        found.append(torch.nn.functional.pad(numbers, (0, padding)).view(-1, weight.blocksize).amax(dim=1))
    plain = torch.cat(found)
    if not weight.double:
        return plain
    offset = plain.mean()
    coded, state = bnb.quantize_blockwise(plain - offset, blocksize=256)
    return bnb.dequantize_blockwise(coded, state) + offset


def apply(targets: dict[str, Target], base: Path, run: Run) -> dict[str, Target]:
    """The same targets, those that bitsandbytes quantised for training after their round trip."""
    from wherry.train.config import quantization_config

    config = quantization_config(run.recipe.train)
    if not config.load_in_4bit:
        raise WherryError(
            "merge.base is nf4, but train.quantization loads 8-bit weights",
            "merge.base",
            "remove merge.base: the adapter is merged into the 16-bit weights",
        )
    layers = quantised_layers(base, config, run.recipe.model.trust_remote_code)
    return {
        name: _quantised(target, layers.get(target.module.removesuffix(".weight"))) for name, target in targets.items()
    }


def quantised_layers(base: Path, config: Any, trust_remote_code: bool = False) -> dict[str, Linear4bit]:
    """Module name → layer, of what transformers and bitsandbytes quantise in the model of a folder; without memory.

    They leave out the head, whatever is tied to the embedding, and what the configuration says.
    """
    from transformers.quantizers import AutoHfQuantizer

    from wherry.merge.names import empty_model

    model = empty_model(base, trust_remote_code)
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model=model, dtype=LOADED, device_map={"": "cpu"})
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def _quantised(target: Target, layer: Linear4bit | None) -> Target:
    if layer is None:
        return target
    if target.shape != (layer.out_features, layer.in_features):
        raise WherryError(
            f"merge.base: nf4 does not know layers that keep their weights as [in, out]: {target.name}",
            "merge.base",
            "remove merge.base: the adapter is merged into the 16-bit weights",
        )
    weight: Any = layer.weight
    return dataclasses.replace(
        target, nf4=Nf4(target.source, weight.quant_type, weight.compress_statistics, weight.blocksize)
    )
