"""Bytes of the weights as training holds them, against what was measured on a GPU."""

from pathlib import Path

import pytest

from wherry.safetensors_file import Checkpoint, Header, TensorInfo
from wherry.train.memory import weight_bytes


def llama_70b() -> Checkpoint:
    """The shapes of a 70B Llama: hidden 8192, 80 layers, 8 of 64 heads for keys and values, vocabulary 128256."""
    hidden, inner, small = 8192, 28672, 1024
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (small, hidden),
        "self_attn.v_proj": (small, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(80) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (128256, hidden), "lm_head.weight": (128256, hidden)}
    shapes |= {"model.norm.weight": (hidden,)}
    tensors = {name: TensorInfo("BF16", shape, 0, 0) for name, shape in shapes.items()}
    return Checkpoint(Path("x"), [Header(Path("x"), tensors, {})])


@pytest.mark.parametrize(
    ("tuning", "gib"),
    [
        ("qlora", 36.93),  # measured on an H200: torch.cuda.memory_allocated after loading
        ("lora", 131.4),  # 70.55 B parameters of 2 bytes
        ("full", 262.8),
    ],
)
def test_a_70b_model(tuning, gib):
    assert weight_bytes(llama_70b(), tuning) / 2**30 == pytest.approx(gib, rel=0.01)


def test_split_weights_of_full_tuning_are_bfloat16():
    assert weight_bytes(llama_70b(), "full", split=True) == weight_bytes(llama_70b(), "lora")
