"""A dry run trains for real, on a random model of the recipe's shape, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from wherry.errors import Exit

TORCHRUN = [str(Path(sys.prefix) / "bin/torchrun"), "--nproc-per-node", "2", "--no-python", "--"]
WHERRY = [sys.executable, "-m", "wherry"]


@pytest.fixture
def recipe(tmp_path, runs, monkeypatch):
    """A model folder that holds config.json and nothing else: there are no weights to read."""
    monkeypatch.setenv("WHERRY_DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 512, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {{name: {folder}}}\n"
        "data: {train: not-there.jsonl}\n"
        "train: {args: {learning_rate: 1e-4, per_device_train_batch_size: 2, max_length: 64, save_steps: 1}}\n"
    )
    return path


DRY = ("--dry-run", "--steps", "2")


@pytest.mark.parametrize("values", ["train.tuning=qlora", "train.tuning=full", "train.objective=dpo"])
def test_planned_and_measured_are_printed_and_nothing_is_left(wherry, recipe, runs, values):
    code, out, err = wherry("train", recipe, values, *DRY)
    assert code == 0, err
    assert "1 rank, random weights" in out
    assert "step 2 of 2" in err
    assert "planned" in out
    assert "tokens a second" in out
    assert not runs.exists()


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_two_ranks_hold_half_of_the_weights_each(recipe, runs, tuning):
    values = ["train.sharding=zero3", f"train.tuning={tuning}"]
    command = [*TORCHRUN, *WHERRY, "train", str(recipe), *values, *DRY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "(50.0%)" in done.stderr
    assert f"dry run: {tuning} + ZeRO-3, 2 ranks" in done.stdout
    assert not runs.exists()


def test_the_random_model_is_the_one_that_training_would_read(recipe, tiny_chat_model, runs):
    """Same modules, dtypes and quantisation as from_pretrained gives."""
    import torch

    from wherry.rundir import Run
    from wherry.train import model, random_model

    run = Run.open(str(recipe), None, ["train.tuning=qlora", f"model.name={tiny_chat_model}"])
    (run.dir("prepare")).mkdir(parents=True)
    (run.dir("prepare") / "model").symlink_to(tiny_chat_model)
    read = model._from_pretrained(run, torch.bfloat16, random_model.quantization_config(run.recipe.train))
    made = random_model.make(run, torch.device("cpu"))

    def described(network):
        return {name: (type(p), p.dtype, tuple(p.shape)) for name, p in network.named_parameters()}

    assert described(made) == described(read)
    assert not any(t.is_meta for t in (*made.parameters(), *made.buffers()))


def test_refusals(wherry, recipe):
    code, _, err = wherry("train", recipe, "train.args.per_device_train_batch_size=-1", *DRY)
    assert code == Exit.USAGE, err
    assert "give a whole number above 0" in err
    code, _, err = wherry("train", recipe, "model.name=someone/unknown", *DRY)
    assert code == Exit.USAGE
    assert "the shape of someone/unknown is not known here" in err
