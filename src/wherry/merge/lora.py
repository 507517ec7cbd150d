"""PEFT's arithmetic, a few rows at a time: what merge_and_unload() does to a weight, and nothing else of PEFT.

Importing PEFT costs several seconds and 400 MB; the tests hold this module to PEFT's own result, bit by bit.
LoRA: arXiv:2106.09685. Rank-stabilised: arXiv:2312.03732. DoRA: arXiv:2402.09353.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from wherry.merge.stream import Source, load

STRIDE = 1 << 19  # numbers worked on at once: 2 MB in fp32 stay in a core's cache
TILE = 32  # rows, or a multiple: matrix kernels then sum as they do for the whole matrix

Rows = Callable[[int, int], torch.Tensor]
"""Rows i to j of a weight, as they are before the merge, in memory of their own."""


@dataclass(frozen=True)
class Factor:
    """A matrix of the adapter in fp32 (PEFT widens 16-bit ones too), or the part of it that one expert has.

    expert: (which, of how many). split: PEFT keeps all experts in one matrix, A by rows (expert, rank), B by columns
    (rank, expert). rows: of those, from and to.
    """

    source: Source
    expert: tuple[int, int] | None = None
    split: str = "rows"
    rows: tuple[int, int] | None = None

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        height, width = self.source.info.shape
        count = self.expert[1] if self.expert else 1
        height, width = (height // count, width) if self.split == "rows" else (height, width // count)
        return (self.rows[1] - self.rows[0] if self.rows else height), width

    def value(self) -> torch.Tensor:
        whole = widened(self.source)
        if self.expert:
            which, count = self.expert
            whole = whole.reshape(count, -1, whole.shape[1])[which] if self.split == "rows" else whole[:, which::count]
        return (whole[slice(*self.rows)] if self.rows else whole).contiguous()


@functools.lru_cache(maxsize=8)
def widened(source: Source) -> torch.Tensor:
    return load(source).float()


@dataclass(frozen=True)
class Lora:
    """The LoRA of one weight.

    a: [rank, in], b: [out, rank]. across: the weight is stored [in, out] (embeddings, transformers' Conv1D), else
    [out, in]. rounded: PEFT rounds the product to the weight's dtype before it adds it, as it does for embeddings and
    for parameters that are no layer's. magnitude: DoRA's, one number an output. bias: what lora_bias adds to the
    module's bias.
    """

    a: Factor
    b: Factor
    scaling: float
    across: bool = False
    rounded: bool = False
    magnitude: Source | None = None
    bias: Source | None = None

    @property
    def parts(self) -> list[Source]:
        """The adapter's tensors that it is made of."""
        return [s for s in (self.a.source, self.b.source, self.magnitude, self.bias) if s is not None]

    def merge(self, weight: torch.Tensor, begin: int, original: Rows) -> None:
        """Add to weight, which is rows begin… of the whole, in place: fp32 sums, one rounding to its dtype.

        original: the whole weight before the merge, for DoRA's norms where they run across rows.
        """
        norms = column_norms(self, original) if self.magnitude and self.across else None
        for low, high, delta in self.deltas(begin, begin + len(weight), weight.shape[1]):
            part = weight[low - begin : high - begin]
            if self.rounded and not self.magnitude:
                part += delta.to(part.dtype)
                continue
            total = part.to(torch.promote_types(part.dtype, torch.float32)).add_(delta)
            if self.magnitude:
                factor = widened(self.magnitude)
                if norms is not None:
                    total = (factor / norms).view(1, -1) * total
                else:
                    norm = torch.linalg.norm(total, dim=1).to(total.dtype)
                    total = (factor[low:high] / norm).view(-1, 1) * total
            part.copy_(total)

    def deltas(self, begin: int, end: int, width: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(from, to, scaling · B·A) for some rows at a time."""
        a, b, scaling = self.a.value(), self.b.value(), self.scaling
        if math.frexp(scaling)[0] == 0.5:  # a power of two: exact wherever it is applied, and B is the smallest place
            b, scaling = b * scaling, 1.0
        step = max(1, STRIDE // width // TILE) * TILE
        for low in range(begin, end, step):
            high = min(low + step, end)
            product = torch.mm(b, a[:, low:high]).T if self.across else torch.mm(b[low:high], a)
            yield low, high, product if scaling == 1.0 else product.mul_(scaling)

    def merge_bias(self, bias: torch.Tensor) -> None:
        assert self.bias is not None
        bias += widened(self.bias) * self.scaling


@functools.lru_cache(maxsize=2)
def column_norms(lora: Lora, original: Rows) -> torch.Tensor:
    """The L2 norm of each column of weight + delta, [columns] in fp32; summed in fp64 where it takes several reads."""
    height = lora.a.shape[1]
    width = lora.b.shape[0]
    step = max(1, 8 * STRIDE // width)
    if step >= height:
        total = original(0, height).float().add_(torch.mm(lora.b.value(), lora.a.value()).T.mul_(lora.scaling))
        return torch.linalg.norm(total.T, dim=1)
    squares = torch.zeros(width, dtype=torch.float64)
    for begin in range(0, height, step):
        end = min(begin + step, height)
        rows = original(begin, end).float()
        for low, high, delta in lora.deltas(begin, end, width):
            squares += (rows[low - begin : high - begin] + delta).double().square_().sum(dim=0)
    return squares.sqrt().float()
