"""Rough time of a step: multiplications at the rate that such a GPU reaches, dequantisation, and ZeRO-3's traffic.

The rate is the only number here that was measured rather than derived: frozen layers' products took 77 % of a step and
ran at 86 % of what a plain product reaches, which was 80 % of an H200's data sheet. tests/unit/test_plan_measured.py
holds the estimate against measured steps: within a quarter.
"""

from __future__ import annotations

from dataclasses import dataclass

from wherry.plan.gpus import Gpus
from wherry.plan.setting import Setting
from wherry.plan.shapes import Shape

RATE = 0.80 * 0.86 * 0.77
UNFUSED = 1.06  # transformers' own norms and SwiGLU against Liger's, by how often they read and write
WIDE = 1.17  # a float32 residual stream
OPERATIONS, LAUNCH = 75, 1e-5  # of a layer's forward pass, and seconds that Python and the driver take to start one
NETWORK = 50.0  # GB/s of each GPU to other nodes: one 400 Gbit/s adapter a GPU
NETWORK_RATE = 0.8


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step on all ranks; tokens: of all ranks in it."""

    compute: float
    traffic: float
    tokens: int
    how: str

    @property
    def seconds(self) -> float:
        return max(self.compute, self.traffic)  # DeepSpeed gathers ahead of use


def step(shape: Shape, setting: Setting, gpus: Gpus) -> Step:
    products = shape.layers * shape.layer_linear + shape.vocab * shape.hidden
    attention = setting.sequence * shape.heads * shape.head * shape.layers  # causal: half of all pairs
    # Forward; the gradient of the input; the gradient of the weight, where it learns; and what is recomputed.
    again = setting.recomputed / shape.layers
    passes = 2 + again + (setting.tuning == "full")
    flops = setting.tokens * passes * 2 * (products + attention)
    compute = flops / (gpus.tflops * 1e12 * RATE)
    compute *= 1.0 if setting.fused else UNFUSED
    compute *= WIDE if setting.stream == 4 and setting.tuning != "full" else 1.0
    how = f"{flops / 1e12:,.0f} TFLOP / ({gpus.tflops:.0f} TFLOP/s × {RATE:.2f})"
    if setting.tuning == "qlora":
        expanded = (2 + again) * shape.layers * shape.layer_linear * 2.5
        compute += expanded / (gpus.bandwidth * 1e12)
        how += f" + {expanded / 1e9:,.0f} GB of NF4 made 16 bits wide / {gpus.bandwidth} TB/s"
    started = (3 + again) * shape.layers * OPERATIONS * LAUNCH  # the backward pass has twice as many
    if started > compute:
        compute, how = started, f"{started / LAUNCH:,.0f} operations × {LAUNCH * 1e6:.0f} µs to start one"
    traffic = 0.0
    if setting.sharded:
        moved = (2 + again) * 2.0 * shape.parameters * (1 - 1 / setting.ranks)
        traffic = moved / (gpus.link * 1e9 * NETWORK_RATE)
        if gpus.nodes > 1:  # each adapter of a node carries its share of what the node receives
            traffic = max(traffic, moved / gpus.per_node / (NETWORK * 1e9 * NETWORK_RATE))
        how += f"; ZeRO-3 moves {moved / 1e9:,.0f} GB into every GPU: {traffic:.1f} s, while it computes"
    times = setting.accumulation
    return Step(times * compute, times * traffic, times * setting.ranks * setting.tokens, how)
