"""The plan's list of kept tensors against what autograd really keeps of a small Llama on the CPU.

Liger's kernels need a GPU: those lines of the list are checked by the peaks in test_plan_measured.py alone.
"""

import pytest

from wherry.plan import activations, memory
from wherry.plan.setting import Setting
from wherry.plan.shapes import Shape

SHAPE = Shape(
    vocab=128, hidden=256, inner=768, layers=3, heads=8, kv_heads=2, head=32, tied=False, bias=False, context=512
)
TOKENS = 320


def network(tuning: str, adapter_size: int = 2, dropout: float = 0.0, targets="all-linear"):
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    from wherry.train import random_model

    config = LlamaConfig(
        vocab_size=SHAPE.vocab,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.inner,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        tie_word_embeddings=False,
    )
    if tuning.startswith("qlora"):
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = random_model.quantised(config, quantization, torch.bfloat16, torch.device("cpu"))
    else:
        model = LlamaForCausalLM(config).to(torch.float32 if tuning == "full" else torch.bfloat16)
    if tuning == "full":
        return model
    if tuning == "qlora, upcast":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    lora = LoraConfig(r=16, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=adapter_size == 4).train()


def saved_by_layers(model, layers, autocast: bool) -> int:
    """Bytes that autograd keeps between the first layer's input and the last layer's output; weights not counted."""
    import torch

    storages: dict[int, int] = {}
    owned = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    active = {"now": False}

    def pack(tensor):
        pointer = tensor.untyped_storage().data_ptr()
        if active["now"] and pointer not in owned and tensor.numel() > TOKENS:
            storages[pointer] = tensor.untyped_storage().nbytes()
        return tensor  # which keeps it alive, so that no other tensor gets its address

    layers[0].register_forward_pre_hook(lambda *_: active.update(now=True))
    layers[-1].register_forward_hook(lambda *_: active.update(now=False))
    ids = torch.randint(0, SHAPE.vocab, (1, TOKENS))
    narrow = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), narrow:
        embedded = model.get_input_embeddings()(ids).requires_grad_(True)
        model(inputs_embeds=embedded, use_cache=False)
    return sum(storages.values())


def planned(setting: Setting) -> float:
    return sum(activations.saved(SHAPE, setting).values()) * TOKENS * SHAPE.layers


def setting(tuning, adapter_size, autocast, dropout=False, targets="all-linear"):
    return Setting(
        tuning.partition(",")[0],
        upcast="upcast" in tuning,
        sharded=False,
        ranks=1,
        sequence=TOKENS,
        batch=1,
        recomputed=0,
        adapter_size=adapter_size,
        autocast=autocast,
        dropout=dropout,
        targets=targets,
        loss="whole",
    )


@pytest.mark.parametrize(
    ("tuning", "adapter_size", "autocast", "dropout", "targets"),
    [
        ("lora", 2, False, 0.0, "all-linear"),
        ("lora", 4, True, 0.0, "all-linear"),
        ("lora", 2, False, 0.1, "all-linear"),
        ("lora", 2, False, 0.0, ["q_proj"]),
        ("lora", 2, False, 0.0, ["q_proj", "down_proj"]),
        ("full", 4, True, 0.0, "all-linear"),
        ("qlora", 4, True, 0.0, "all-linear"),
        ("qlora", 2, False, 0.0, "all-linear"),
        ("qlora, upcast", 4, True, 0.0, "all-linear"),
    ],
)
def test_what_autograd_keeps(monkeypatch, tuning, adapter_size, autocast, dropout, targets):
    # PEFT's 4-bit module asks whether the GPU's autocast is on, whatever the device.
    monkeypatch.setattr("torch.is_autocast_enabled", lambda *_: autocast)
    model = network(tuning, adapter_size, dropout, targets)
    layers = model.base_model.model.model.layers if tuning != "full" else model.model.layers
    wanted = setting(tuning, adapter_size, autocast, bool(dropout), targets)
    measured = saved_by_layers(model, layers, autocast)
    casts = SHAPE.layers * memory.cast_copies(SHAPE, wanted)
    # The CPU's dropout keeps its mask in 16 bits, a GPU's in 8.
    if dropout:
        casts += TOKENS * SHAPE.layers * sum(inputs for inputs, _ in SHAPE.linears.values())
    assert planned(wanted) + casts == pytest.approx(measured, rel=0.05)
