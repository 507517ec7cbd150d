"""A small random Llama with a real fast tokenizer, for tests that load or serve a model."""

from __future__ import annotations

from pathlib import Path


def make_tiny_model(
    folder: Path,
    *,
    vocab_size: int = 512,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = True,
    shards: int = 1,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Path:
    """Write config, safetensors and tokenizer into folder and return it.

    vocab_size counts the embedding's rows: at least the tokenizer's 262 (256 bytes and 6 special tokens), and all of
    them where it is larger are reserved tokens, as published models have them. shards: how many weights files, about.
    vLLM on a CPU needs heads of at least 32 numbers: hidden_size=128 with four of them.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    assert vocab_size >= len(alphabet) + len(special), vocab_size
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
        model_max_length=512,
    )
    fast.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=fast.pad_token_id,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // shards + 1)
    fast.save_pretrained(folder)
    return folder
