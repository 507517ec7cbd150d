"""GPU memory of one rank at each moment of a step, part by part; the fullest moment is what must fit.

torch.cuda.max_memory_allocated is the sum without context and fragmentation. No number here is fitted:
tests/unit/test_plan_measured.py compares with peaks measured on an H200, every one within 5 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wherry.plan import activations
from wherry.plan.setting import Setting
from wherry.plan.shapes import Shape
from wherry.train.config import ZERO3
from wherry.train.memory import NF4

GIB = 2**30
CHUNK = 256  # tokens, TRL's _CHUNKED_LM_HEAD_CHUNK_SIZE
WORKSPACES = 2 * 32 << 20  # cuBLAS takes 32 MiB for each thread that multiplies: forward's and backward's
# DeepSpeed's defaults, in parameters, where train.config.ZERO3 says nothing else: gathered at a time, ahead of use, in
# the bucket that gradients leave from, and those whose float32 gradients are made at a time.
LIVE, PREFETCH, BUCKET, STEP_GROUP = 10**9, 5 * 10**7, 5 * 10**8, 10**9
CONTEXT, NCCL, NCCL_NODES = 0.6 * GIB, 0.5 * GIB, 1.0 * GIB  # not measured by torch; seen in nvidia-smi
FRAGMENTATION = 0.03  # reserved over allocated: 0.6 to 7 % were measured, 2 % in the middle

NAMES = {
    "weights": "weights",
    "quantisation": "NF4's scales",
    "adapter": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "kept": "activations kept",
    "layer": "one layer at work",
    "loss": "logits and loss",
    "gather": "ZeRO-3 and DDP buffers",
    "context": "CUDA context, NCCL",
    "fragmentation": "fragmentation",
}


@dataclass(frozen=True)
class Part:
    """Bytes, and the formula that gave them, with its numbers."""

    size: float
    how: str


@dataclass(frozen=True)
class Moment:
    name: str
    parts: dict[str, Part]

    @property
    def allocated(self) -> float:
        """What torch.cuda.memory_allocated says then, bytes."""
        return sum(part.size for name, part in self.parts.items() if name not in ("context", "fragmentation"))

    @property
    def total(self) -> float:
        return sum(part.size for part in self.parts.values())


def peak(shape: Shape, setting: Setting, nodes: int = 1) -> Moment:
    """The fullest moment of a step, with what lies beyond torch's allocator added."""
    fullest = max(moments(shape, setting), key=lambda moment: moment.allocated)
    nccl = 0.0 if setting.ranks == 1 else NCCL if nodes == 1 else NCCL_NODES
    context = Part(CONTEXT + nccl, f"{CONTEXT / GIB:.1f} GiB context, {nccl / GIB:.1f} GiB NCCL (seen, not computed)")
    lost = Part(FRAGMENTATION * fullest.allocated, f"{FRAGMENTATION:.0%} of {fullest.allocated / GIB:.2f} GiB")
    return Moment(fullest.name, {**fullest.parts, "context": context, "fragmentation": lost})


def moments(shape: Shape, setting: Setting) -> Iterator[Moment]:
    """The loss, forward and backward; each layer's backward, from the last to the first; the optimizer's step."""
    always = static(shape, setting)
    if setting.sharded and setting.tuning == "qlora":  # bitsandbytes reads whole tensors; the engine splits them
        yield Moment("loading", always | {"weights": weights(shape, replace(setting, sharded=False))})
    earlier = 1.0 if setting.accumulation > 1 or setting.sharded else 0.0  # of the gradients are there before
    yield Moment(
        "the loss",
        always
        | {
            "gradients": gradients(shape, setting, earlier),
            "kept": kept(shape, setting, shape.layers),
            "loss": loss(shape, setting),
        },
    )
    for layer in range(shape.layers - 1, -1, -1):
        done = max(earlier, (shape.layers - 1 - layer) / shape.layers)
        yield Moment(
            f"backward of layer {layer + 1} of {shape.layers}",
            always
            | {
                "gradients": gradients(shape, setting, done),
                "kept": kept(shape, setting, layer + 1),
                "layer": at_work(shape, setting, recomputed=layer < setting.recomputed),
            },
        )
    yield Moment("the optimizer's step", always | {"gradients": gradients(shape, setting, 1.0, stepping=True)})


# ---- what is always there --------------------------------------------------------------------------------------------


def static(shape: Shape, setting: Setting) -> dict[str, Part]:
    found = {"weights": weights(shape, setting)}
    if setting.tuning == "qlora":
        quantised = shape.layers * shape.layer_linear
        found["quantisation"] = Part(
            quantised * (NF4 - 0.5), f"{quantised:,} parameters × (1/64 + 4/(64 × 256)) B: double quantisation"
        )
    if setting.tuning != "full":
        count = setting.trainable(shape)
        found["adapter"] = Part(
            count * setting.trainable_size / setting.parts,
            f"rank {setting.lora_rank} on {len(shape.adapted(setting.targets))} modules of {shape.layers} layers: "
            f"{count:,} parameters × {setting.trainable_size} B" + _over(setting),
        )
    count = setting.trainable(shape)
    found["optimizer"] = Part(
        count * setting.state_size / setting.parts,
        f"{count:,} parameters × {setting.state_size:.3g} B ({setting.optimizer}"
        + (", float32 master copy included" if setting.sharded else "")
        + ")"
        + _over(setting),
    )
    found["gather"] = buffers(shape, setting)
    return found


def _over(setting: Setting) -> str:
    return f" / {setting.parts} ranks" if setting.parts > 1 else ""


def weights(shape: Shape, setting: Setting) -> Part:
    """In the dtype that training holds them in; NF4 leaves embeddings, head and norms in 16 bits."""
    if setting.tuning == "qlora":
        quantised = shape.layers * shape.layer_linear
        rest, size = shape.embeddings + shape.small, 4 if setting.upcast else 2
        return Part(
            (quantised * 0.5 + rest * size) / setting.parts + WORKSPACES,
            f"({quantised:,} parameters × 0.5 B (NF4) + {rest:,} × {size} B (embeddings, head, norms)){_over(setting)}"
            f" + {WORKSPACES >> 20} MiB for cuBLAS",
        )
    size = 4 if setting.tuning == "full" and not setting.sharded else 2
    reference = 2 if setting.tuning == "full" and setting.paired else 0
    return Part(
        shape.parameters * (size + reference) / setting.parts + WORKSPACES,
        f"{shape.parameters:,} parameters × {size} B{_over(setting)} + {WORKSPACES >> 20} MiB for cuBLAS"
        + (", and the reference model in 16 bits" if reference else ""),
    )


def buffers(shape: Shape, setting: Setting) -> Part:
    """ZeRO-3 gathers what it works on, and sends gradients from a bucket; DDP keeps a copy of all gradients."""
    if setting.sharded:
        prefetch = zero3("stage3_prefetch_bucket_size", PREFETCH, int(0.9 * shape.hidden**2))
        bucket = zero3("reduce_bucket_size", BUCKET, shape.hidden**2)
        held = shape.parameters // 4 if setting.tuning == "qlora" else shape.parameters  # 4 of 4 bits in a number of 16
        live = max(min(LIVE + prefetch, held), shape.vocab * shape.hidden)
        return Part(
            2.0 * (live + bucket),
            f"2 B × ({live:,} parameters gathered at a time + {bucket:,} in the gradients' bucket)",
        )
    if setting.ranks > 1:
        count = setting.trainable(shape)
        return Part(count * setting.trainable_size, f"DDP's buckets: {count:,} gradients × {setting.trainable_size} B")
    return Part(0.0, "one rank: none")


def zero3(name: str, default: int, by_width: int) -> int:
    """What Wherry's DeepSpeed configuration says; by_width: what transformers' integration makes of "auto"."""
    value = ZERO3["zero_optimization"].get(name, default)
    return by_width if value == "auto" else int(value)


def gradients(shape: Shape, setting: Setting, share: float, stepping: bool = False) -> Part:
    """share: of the trainable parameters, those whose gradients are there."""
    count = setting.trainable(shape)
    size = share * count * setting.trainable_size / setting.parts
    how = f"{share:.0%} of {count:,} parameters × {setting.trainable_size} B{_over(setting)}"
    if stepping and setting.sharded:
        group = min(count / setting.parts, STEP_GROUP)
        return Part(size + 4 * group, f"{how} + {group:,.0f} × 4 B in float32 for the step")
    return Part(size, how)


# ---- what comes and goes ---------------------------------------------------------------------------------------------


def kept(shape: Shape, setting: Setting, layers: int) -> Part:
    """Activations of the first `layers` layers, between forward and backward."""
    recomputed = min(layers, setting.recomputed)
    whole = layers - recomputed
    of_whole = sum(activations.saved(shape, setting).values())
    of_recomputed = activations.checkpoint(shape, setting)
    if setting.products_kept:
        of_recomputed = activations.kept_products(shape, setting)
    casts = whole * cast_copies(shape, setting)
    return Part(
        setting.tokens * (recomputed * of_recomputed + whole * of_whole) + casts,
        f"{setting.tokens:,} tokens × ({recomputed} recomputed layers × {of_recomputed:,.0f} B + "
        f"{whole} others × {of_whole:,.0f} B)" + (f" + {casts / GIB:.2f} GiB of weights cast to 16 bits" * bool(casts)),
    )


def cast_copies(shape: Shape, setting: Setting) -> float:
    """16-bit copies of a layer's float32 trainable weights, that autocast makes and the backward pass needs."""
    if not setting.autocast or setting.trainable_size != 4:
        return 0.0
    if setting.tuning == "full":
        return 2.0 * shape.layer_linear
    return 2.0 * setting.trainable(shape) / shape.layers


def at_work(shape: Shape, setting: Setting, recomputed: bool) -> Part:
    """The layer whose backward runs, when down_proj or SwiGLU is reached: both hold most of the MLP's tensors.

    At down_proj: the gradient that came in, two gradients of the module's input (LoRA's and the frozen weight's, before
    they are added), and the weight in 16 bits where it is quantised. The input itself has been used up.
    """
    saved = activations.saved(shape, setting)
    out = activations.product_size(setting)
    held = sum(saved.values()) - activations.checkpoint(shape, setting) if recomputed else 0.0
    used_up = saved.get("input of down_proj", 0.0)
    narrowed = 2 * shape.inner if out == 4 else 0  # a product's 16-bit gradient, before it is widened
    down = setting.stream * shape.hidden + 2 * out * shape.inner + narrowed - used_up
    swiglu = setting.stream * shape.hidden + (1 if setting.fused else 3) * out * shape.inner - used_up
    weight = 2.0 * shape.hidden * shape.inner if setting.tuning == "qlora" else 0.0
    casts = cast_copies(shape, setting) if recomputed else 0.0
    at_down = setting.tokens * (held + down) + weight
    at_swiglu = setting.tokens * (held + swiglu)
    return Part(
        max(at_down, at_swiglu) + casts,
        f"{setting.tokens:,} tokens × ({held:,.0f} B recomputed + {max(down, swiglu):,.0f} B of gradients)"
        + (f" + {weight / GIB:.2f} GiB: down_proj's weight in 16 bits" if weight else "")
        + (f" + {casts / GIB:.2f} GiB of weights cast to 16 bits" if casts else ""),
    )


def loss(shape: Shape, setting: Setting) -> Part:
    """Logits, their gradients, and the last hidden states that they are made from."""
    hidden = setting.tokens * shape.hidden * (setting.stream + 2.0)
    # A float32 head is cast for its product, and the copy waits for the backward pass.
    head = 2.0 * shape.vocab * shape.hidden if setting.autocast and setting.stream == 4 else 0.0
    also = f" + {head / GIB:.2f} GiB: the head cast to 16 bits" if head else ""
    if setting.loss == "whole":
        return Part(
            12.0 * setting.tokens * shape.vocab + hidden + head,
            f"{setting.tokens:,} tokens × {shape.vocab:,} × 12 B (float32: log-softmax and two gradients) + "
            f"{hidden / GIB:.2f} GiB of hidden states{also}",
        )
    if setting.loss == "fused":
        split = -(-shape.vocab // shape.hidden)
        chunk = min(setting.tokens, 1 << (-(-setting.tokens // split) - 1).bit_length())
        grown = 4.0 * shape.vocab * shape.hidden if setting.tuning == "full" else 0.0  # the head's gradient, at once
        return Part(
            2.0 * chunk * shape.vocab + hidden + head + grown,
            f"{chunk} tokens at a time × {shape.vocab:,} × 2 B + {hidden / GIB:.2f} GiB of hidden states{also}",
        )
    return Part(
        18.0 * CHUNK * shape.vocab + 2 * hidden + head,
        f"{CHUNK} tokens at a time × {shape.vocab:,} × 18 B + {2 * hidden / GIB:.2f} GiB of hidden states{also}",
    )
