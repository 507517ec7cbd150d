"""A training that is killed at random moments ends as one that was never killed, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("training_kills.py")
RUNS, KILLS = 4, 5


@pytest.fixture
def recipe(tmp_path, tiny_chat_model, runs, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for i in range(64):
            turns = [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": str(i + 1)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    path = tmp_path / "kills.yaml"
    path.write_text(
        f"model: {{name: {tiny_chat_model}}}\n"
        f"data: {{train: {rows}}}\n"
        "train:\n"
        "  args: {learning_rate: 1e-2, per_device_train_batch_size: 4, max_steps: 40, save_steps: 2,\n"
        "         logging_steps: 1, gradient_checkpointing: false, lr_scheduler_type: cosine, warmup_steps: 5}\n"
        "  lora: {lora_dropout: 0.1}\n"  # the random state is part of what must be restored
    )
    return path


def adapter(run):
    return (run / "train/adapter/adapter_model.safetensors").read_bytes()


def test_random_kills_change_nothing(recipe, runs, tmp_path):
    def train(name, kills, seed=0):
        prepared = subprocess.run(
            [sys.executable, "-m", "wherry", "prepare", recipe, "--run", name], capture_output=True, text=True
        )
        assert prepared.returncode == 0, prepared.stderr
        log = tmp_path / f"{name}.log"
        env = os.environ | {"ATTEMPTS_LOG": str(log)}
        words = [sys.executable, SCRIPT, recipe, name, str(kills), str(seed)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), log.read_text()

    found, log = train("whole", 0)
    assert found["code"] == 0, log
    met = []
    for number in range(RUNS):
        found, log = train(f"cut{number}", KILLS, seed=number)
        assert found["code"] == 0, log[-3000:]
        assert "Traceback" not in log
        assert found["kills"] == sorted(found["kills"])  # nothing that was saved is lost
        assert adapter(runs / f"cut{number}") == adapter(runs / "whole"), number
        steps = [json.loads(line) for line in (runs / f"cut{number}/train/metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in steps if "loss" in line] == list(range(1, 41))
        met += found["kills"]
    print(f"{len(met)} kills, after checkpoints {met}")
    assert len(met) >= RUNS * KILLS // 2
    assert len({*met} - {0, 40}) >= 3  # some met the middle of the work
