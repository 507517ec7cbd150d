"""The merged model in the real vLLM says, token by token, what base + adapter say in transformers."""

from pathlib import Path

import greedy
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from wherry import merge
from wherry.rundir import Run

RECIPE = """
model: {name: base}
data: {train: rows.jsonl}
serve: {ready_timeout: 300, drain_timeout: 5, vllm: {max_model_len: 256, max_num_seqs: 4, dtype: float32}}
"""
PROMPTS = [[1, 40, 41, 42], [1, 7, 99, 180, 23, 5], [1, 250, 3, 77, 12, 13, 14]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("tied", {"target_modules": "all-linear"}),
        ("untied", {"target_modules": ["q_proj", "down_proj", "lm_head"], "use_dora": True}),
    ],
)
def test_greedy_tokens_are_those_of_base_and_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lora: dict
) -> None:
    monkeypatch.setenv("WHERRY_RUNS", str(tmp_path / "runs"))
    (tmp_path / f"{name}.yaml").write_text(RECIPE)
    run = Run.open(str(tmp_path / f"{name}.yaml"), None, [])
    with run.work("prepare"):
        base = make_tiny_model(run.dir("prepare") / "model", hidden_size=128, tied=name == "tied", dtype="float32")
        (run.dir("prepare") / "tokenizer").mkdir()
        for path in base.glob("tokenizer*"):
            (run.dir("prepare") / "tokenizer" / path.name).write_bytes(path.read_bytes())
    with run.work("train"):
        tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=8, **lora))
        torch.manual_seed(1)
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        tuned.save_pretrained(run.dir("train") / "adapter")
    assert merge.main([str(tmp_path / f"{name}.yaml")]) == 0

    expected = greedy.adapted(base, run.dir("train") / "adapter", PROMPTS, tokens=24)
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)  # they depend on the prompt
    assert greedy.served(run, PROMPTS, tokens=24) == expected
