"""Planned against measured on one real GPU, by a dry run of a billion parameters; and what the doctor sees of it.

Skipped aloud without a GPU.
"""

import json
import re
import subprocess
import sys

import pytest

from wherry.device import has_gpu

pytestmark = pytest.mark.skipif(not has_gpu(), reason="LOUD: no NVIDIA GPU is visible here")

RECIPE = """
model: {name: meta-llama/Llama-3.2-1B}
data: {train: not-there.jsonl}
train: {args: {learning_rate: 1e-4, per_device_train_batch_size: 1, max_length: 4096}}
"""


@pytest.fixture
def recipe(tmp_path, runs):
    path = tmp_path / "one.yaml"
    path.write_text(RECIPE)
    return path


def wherry(*arguments):
    command = [sys.executable, "-m", "wherry", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    "values",
    [
        ["train.tuning=qlora"],
        ["train.tuning=qlora", "train.args.gradient_checkpointing=false"],
        ["train.tuning=lora"],
        ["train.tuning=lora", "train.args.use_liger_kernel=true"],
        ["train.tuning=lora", "train.args.loss_type=nll"],
        ["train.tuning=full"],
        ["train.tuning=lora", "train.args.per_device_train_batch_size=4", "train.args.max_length=1024"],
    ],
    ids=" ".join,
)
def test_what_is_allocated_is_what_was_planned(recipe, values):
    done = wherry("train", recipe, *values, "--dry-run")
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    planned, measured = map(float, re.search(r"allocated, GiB a GPU +([\d.]+) +([\d.]+)", done.stdout).groups())
    assert planned == pytest.approx(measured, rel=0.1), done.stdout


def test_the_doctor_sees_the_gpu(recipe):
    done = wherry("doctor", recipe, "--json")
    results = {result["id"]: result for result in json.loads(done.stdout)}
    assert results["device.visible"]["status"] == "pass", done.stderr
    assert results["device.driver"]["status"] == "pass"
    assert not [r for r in results.values() if "the check itself failed" in r["found"]]
