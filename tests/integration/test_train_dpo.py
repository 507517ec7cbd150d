"""Preference pairs with the real DPOTrainer: each tuning, alone and split over two ranks, stopped and resumed."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

WHERRY = [sys.executable, "-m", "wherry"]
TORCHRUN = [str(Path(sys.prefix) / "bin/torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python", "--"]


@pytest.fixture
def recipe(tmp_path, tiny_chat_model, runs, monkeypatch):
    monkeypatch.setenv("WHERRY_DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pairs = tmp_path / "pairs.jsonl"
    with pairs.open("w") as file:
        for i in range(64):
            row = {"prompt": [{"role": "user", "content": f"{i} + 1"}]}
            row |= {
                key: [{"role": "assistant", "content": text}] for key, text in (("chosen", "yes"), ("rejected", "no"))
            }
            file.write(json.dumps(row) + "\n")
    path = tmp_path / "pairs.yaml"
    path.write_text(
        f"model: {{name: {tiny_chat_model}}}\n"
        f"data: {{train: {pairs}}}\n"
        "train:\n"
        "  objective: dpo\n"
        "  args: {learning_rate: 5e-3, per_device_train_batch_size: 4, max_steps: 8, save_steps: 4, beta: 0.5,\n"
        "         logging_steps: 1, gradient_checkpointing: false}\n"
    )
    return path


def finish(*arguments, launcher=()):
    done = subprocess.run([*launcher, *WHERRY, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def learned(run):
    """(losses, share of pairs whose chosen answer is rated higher) of every step."""
    lines = [json.loads(line) for line in (run / "train/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return [line["loss"] for line in steps], [line["rewards/accuracies"] for line in steps]


@pytest.mark.parametrize(
    ("tuning", "sharding"),
    [("lora", "none"), ("qlora", "none"), ("full", "none"), ("lora", "zero3"), ("full", "zero3")],
)
def test_the_chosen_answer_becomes_likelier(recipe, runs, tuning, sharding):
    words = [f"train.tuning={tuning}", f"train.sharding={sharding}"]
    if tuning == "full":
        words.append("train.args.learning_rate=5e-4")
    assert finish("prepare", recipe, *words)[0] == 0
    code, err = finish("train", recipe, *words, launcher=TORCHRUN if sharding == "zero3" else ())
    assert code == 0, err
    assert f"dpo, {tuning}" in err
    losses, accuracies = learned(runs / "pairs")
    assert losses[0] == pytest.approx(math.log(2), abs=0.02)  # before the first step both models are the same
    assert losses[-1] < losses[0] - 0.1
    assert accuracies[-1] == 1
    made = (
        runs / "pairs/train" / ("model/model.safetensors" if tuning == "full" else "adapter/adapter_model.safetensors")
    )
    assert made.is_file()


def test_a_killed_run_resumes_to_the_same_adapter(recipe, runs):
    from safetensors.torch import load_file

    for name in ("whole", "cut"):
        assert finish("prepare", recipe, "--run", name)[0] == 0
    assert finish("train", recipe, "--run", "whole")[0] == 0
    process = subprocess.Popen([*WHERRY, "train", str(recipe), "--run", "cut"], stderr=subprocess.DEVNULL)
    while not (runs / "cut/train/checkpoints/checkpoint-4/complete.json").is_file():
        assert process.poll() is None
    process.kill()
    process.wait()
    code, err = finish("train", recipe, "--run", "cut")
    assert code == 0, err
    assert "from checkpoint-4" in err
    one, two = (load_file(runs / name / "train/adapter/adapter_model.safetensors") for name in ("whole", "cut"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.allclose(two[name], atol=1e-5), name
