"""Tokens that the model has never seen: refused by row unless asked for, then trained, merged and answered with."""

import json
import os
import subprocess
import sys

import pytest

from wherry.errors import Exit
from wherry.safetensors_file import read_header

WHERRY = [sys.executable, "-m", "wherry"]
TOKENS = ["<yes>", "<no>"]


@pytest.fixture
def model(tmp_path):
    """All rows of its embedding are taken."""
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path / "model", vocab_size=262, tied=False)


@pytest.fixture
def recipe(tmp_path, model, runs, monkeypatch):
    monkeypatch.setenv("WHERRY_DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for i in range(64):
            turns = [{"role": "user", "content": str(i)}, {"role": "assistant", "content": TOKENS[i % 2]}]
            file.write(json.dumps({"messages": turns}) + "\n")
    path = tmp_path / "tokens.yaml"
    path.write_text(
        f"model: {{name: {model}, add_tokens: ['<yes>', '<no>']}}\n"
        f"data: {{train: {rows}}}\n"
        "train:\n"
        "  args: {learning_rate: 2e-2, per_device_train_batch_size: 8, max_steps: 24, save_steps: 24,\n"
        "         logging_steps: 1, gradient_checkpointing: false}\n"
    )
    return path


def finish(*arguments):
    done = subprocess.run(
        [*WHERRY, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    return done.returncode, done.stderr


def test_a_token_without_a_row_is_refused_by_the_row_that_has_it(recipe, runs, model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)  # a tokenizer that someone has added a token to
    tokenizer.add_tokens(["<no>"])
    tokenizer.save_pretrained(model)
    code, err = finish("prepare", recipe, "model.add_tokens=[]")
    assert code == Exit.USAGE
    assert "token '<no>' is id 262, the model's embedding has 262 rows" in err
    assert "rows.jsonl:2" in err
    assert "model.add_tokens" in err


def test_added_tokens_are_learned_merged_and_answered_with(recipe, runs, model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for mode in ("prepare", "train", "merge"):
        code, err = finish(mode, recipe)
        assert code == 0, err
    run = runs / "tokens"
    contract = json.loads((run / "manifest.json").read_text())["contract"]
    assert contract["added_token_ids"] == [262, 263]
    assert contract["embedding_rows"] == 320
    deltas = [name for name in read_header(run / "train/adapter/adapter_model.safetensors").tensors if "token" in name]
    assert len(deltas) == 2  # of the embedding and of the output head
    tokenizer = AutoTokenizer.from_pretrained(run / "merge/model")
    merged = AutoModelForCausalLM.from_pretrained(run / "merge/model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(run / "prepare/model", dtype=torch.float32)
    assert not torch.equal(merged.lm_head.weight[262], base.lm_head.weight[262])
    assert torch.equal(merged.lm_head.weight[264:], base.lm_head.weight[264:])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        answer = merged(**prompt).logits[0, -1].argmax().item()
    assert tokenizer.convert_ids_to_tokens(answer) in TOKENS
