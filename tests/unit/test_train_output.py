"""An adapter that was saved is read back before it counts."""

import pytest
import torch
from safetensors.torch import save_file

from wherry.errors import Exit, WherryError
from wherry.train.output import check_adapter
from wherry.train.progress import flops_per_token

NAMES = ("m.q_proj.lora_A.weight", "m.q_proj.lora_B.weight")


@pytest.fixture
def trained():
    """Two trained tensors beside a frozen one."""
    model = torch.nn.ParameterDict({name.replace(".", "_"): torch.ones(2, 2) for name in NAMES})
    model["base"] = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    return model


def save(path, **changed):
    tensors = {name: torch.ones(2, 2) for name in NAMES}
    tensors |= {f"m.q_proj.lora_{key}.weight": value for key, value in changed.items() if value is not None}
    for key, value in changed.items():
        if value is None:
            del tensors[f"m.q_proj.lora_{key}.weight"]
    save_file(tensors, path)
    return path


def test_a_sound_adapter(tmp_path, trained):
    check_adapter(save(tmp_path / "a.safetensors"), trained)
    # Before anything was learned B is zero.
    check_adapter(save(tmp_path / "b.safetensors", B=torch.zeros(2, 2)), trained, learned=False)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"B": None}, "has 1 tensors"),
        ({"B": torch.zeros(0, 2)}, "1 of them empty; 2 were trained"),
        ({"A": torch.tensor([[1.0, float("nan")], [1, 1]])}, "lora_A.weight of the saved adapter is not finite"),
        ({"B": torch.tensor([[1.0, float("inf")], [1, 1]])}, "lora_B.weight of the saved adapter is not finite"),
        ({"B": torch.zeros(2, 2)}, "every B of the saved adapter is zero"),
    ],
)
def test_an_unsound_one_is_named(tmp_path, trained, changed, what):
    with pytest.raises(WherryError) as caught:
        check_adapter(save(tmp_path / "a.safetensors", **changed), trained)
    assert what in caught.value.what
    assert caught.value.code == Exit.VERIFICATION


@pytest.mark.parametrize("tied", [True, False])
def test_operations_of_a_token_are_six_a_weight_where_all_are_trained(tied):
    """Against the count that PyTorch's own counter makes of the matrix products of one step."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    linear = counted[torch.ops.aten.mm]  # attention's own products are batched ones
    # The first layer's input needs no gradient, so one product of its q, k and v is not made.
    assert flops_per_token(model) * 8 == pytest.approx(linear, rel=0.05)
