"""What autograd keeps of a Llama layer for the backward pass, tensor by tensor: bytes a token.

tests/unit/test_plan_activations.py compares the list with what torch.autograd.graph.saved_tensors_hooks sees.
"""

from __future__ import annotations

from wherry.plan.setting import Setting
from wherry.plan.shapes import Shape

ADAPTED_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ADAPTED_MLP = ("mlp.gate_proj", "mlp.up_proj")


def saved(shape: Shape, setting: Setting) -> dict[str, float]:
    """Tensor → bytes a token, for a layer that recomputes nothing.

    A frozen linear module keeps no input; it is the LoRA factor beside it that does (A needs it for its gradient).
    Modules that read the same tensor keep one copy of it, unless each casts its own from float32 (autocast caches
    casts of weights, not of activations) or has its own dropout.
    """
    full = setting.tuning == "full"
    adapted = list(shape.linears) if full else shape.adapted(setting.targets)
    out = product_size(setting)
    found = {"residual stream into the attention": norm(shape, setting)}
    found |= _inputs(shape, setting, "attention", [n for n in ADAPTED_ATTENTION if n in adapted])
    key = 2.0 * shape.kv_heads * shape.head
    if setting.padded and shape.heads != shape.kv_heads:
        key = 2.0 * shape.heads * shape.head  # with a mask, keys and values are repeated for every head
    found["queries"] = 2.0 * shape.heads * shape.head
    found["keys and values"] = 2 * key
    found["attention's output and log-sum-exp"] = 2.0 * shape.heads * shape.head + 4 * shape.heads
    if "self_attn.o_proj" in adapted and (setting.dropout or casts_of_its_own(setting, setting.stream == 2)):
        found["input of o_proj"] = (2.0 + setting.dropout) * shape.heads * shape.head
    if setting.padded:
        found["attention mask, 16 bits"] = 2.0 * setting.sequence
    found["residual stream into the MLP"] = norm(shape, setting)
    found |= _inputs(shape, setting, "MLP", [n for n in ADAPTED_MLP if n in adapted])
    found["gate and up" + ("" if setting.fused else ", and SiLU of gate")] = (
        (2.0 if setting.fused else 3.0) * out * shape.inner
    )
    if "mlp.down_proj" in adapted:
        found["input of down_proj"] = (2.0 + setting.dropout) * shape.inner
    if not full:
        found["outputs of LoRA's A"] = 2.0 * setting.lora_rank * len(adapted)
    return found


def product_size(setting: Setting) -> int:
    """Bytes of a number that a linear module puts out: bitsandbytes gives back its input's dtype, autocast 16 bits."""
    return setting.stream if setting.tuning == "qlora" else 2


def norm(shape: Shape, setting: Setting) -> float:
    """RMSNorm: transformers' own keeps a float32 copy of its input, Liger's the input itself; both a number or two."""
    if setting.fused:
        return setting.stream * shape.hidden + 4.0
    kept = 4 * shape.hidden + 8.0
    return kept + setting.stream * shape.hidden if setting.tuning == "full" else kept


def casts_of_its_own(setting: Setting, narrow: bool) -> bool:
    """Whether each module makes its own 16-bit copy of its input; narrow: the input has 16 bits already.

    PEFT widens the input of a plain linear module to the adapter's float32, and autocast narrows it again; beside a
    quantised module it leaves this to autocast.
    """
    return not narrow or (setting.tuning == "lora" and setting.adapter_size == 4)


def _inputs(shape: Shape, setting: Setting, where: str, modules: list[str]) -> dict[str, float]:
    """What the adapted modules that read one normalised tensor keep of it."""
    own = setting.dropout or casts_of_its_own(setting, setting.stream == 2)
    copies = len(modules) if own else min(1, len(modules))
    size = 2.0 + setting.dropout  # a byte a number for dropout's mask
    return {f"input of the {where}'s modules": size * copies * shape.hidden} if copies else {}


def checkpoint(shape: Shape, setting: Setting) -> float:
    """A layer that recomputes keeps its input alone."""
    return float(setting.stream * shape.hidden)


def kept_products(shape: Shape, setting: Setting) -> float:
    """By operator: the input, and the results of attention and of LoRA's products (bitsandbytes' own are not seen)."""
    adapted = shape.adapted(setting.targets)
    products = sum(2 * (shape.linears[name][1] + setting.lora_rank) for name in adapted)
    return checkpoint(shape, setting) + products + 2 * shape.heads * shape.head + 4 * shape.heads
