"""A model of the recipe's shape with random weights, made on the device: values change neither memory nor speed.

Nothing is downloaded or held in host memory. Under ZeRO-3 each parameter is split as it is made; 4-bit weights are
quantised one module at a time, so that 16 bits of the whole model are nowhere.
"""

from __future__ import annotations

from typing import Any

from wherry.plan.made import find_shape
from wherry.plan.shapes import Shape
from wherry.rundir import Run
from wherry.train.config import quantization_config


def make(run: Run, device: Any) -> Any:
    """The network that model.load would read, for run.recipe."""
    import torch
    from transformers import AutoModelForCausalLM

    quantization = quantization_config(run.recipe.train)
    dtype = torch.float32 if run.recipe.train.tuning == "full" else torch.bfloat16
    config = _config(run)
    if quantization is not None:
        return quantised(config, quantization, dtype, device)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _config(run: Run) -> Any:
    """The model's own configuration where it is here, else one of the known shape."""
    from transformers import AutoConfig

    shape, origin = find_shape(run)
    if origin.endswith("config.json"):
        return AutoConfig.from_pretrained(origin, trust_remote_code=run.recipe.model.trust_remote_code)
    return _of_shape(shape)


def _of_shape(shape: Shape) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen2" if shape.bias else "llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.context,
    )


def quantised(config: Any, quantization: Any, dtype: Any, device: Any) -> Any:
    """Transformers' own replacement of linear modules, filled module by module."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    quantizer.preprocess_model(model=network, dtype=dtype, device_map={"": device})
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, _random(parameter, dtype, device))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):  # of rotary positions: not a parameter
            with torch.device(device):
                module.__init__(config)
    network.tie_weights()
    network.hf_quantizer = quantizer
    network.is_quantized = network.is_loaded_in_4bit = True
    return network


def _random(parameter: Any, dtype: Any, device: Any) -> Any:
    """A parameter of the same kind on the device: norms are ones, what is quantised is quantised here."""
    import torch
    from bitsandbytes.nn import Params4bit

    value = torch.ones(parameter.shape, dtype=dtype, device=device)
    if parameter.dim() > 1:
        value.normal_(std=0.02)
    if isinstance(parameter, Params4bit):
        return Params4bit(value, requires_grad=False, **parameter.__dict__).to(device)
    return torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
