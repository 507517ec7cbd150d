"""Training with the real TRL, PEFT and bitsandbytes on a tiny model: stop, kill, resume, refuse."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from wherry.errors import Exit
from wherry.safetensors_file import read_header


@pytest.fixture
def recipe(tmp_path, tiny_chat_model, runs):
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for i in range(64):
            turns = [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": str(i + 1)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {{name: {tiny_chat_model}}}\n"
        f"data: {{train: {rows}, eval: {rows}}}\n"
        "train:\n"
        "  tuning: lora\n"
        "  args: {learning_rate: 1e-2, per_device_train_batch_size: 4, max_steps: 12, save_steps: 3,\n"
        "         logging_steps: 1, eval_strategy: steps, eval_steps: 6, gradient_checkpointing: false}\n"
    )
    return path


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "wherry", *map(str, arguments)], stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def finish(*arguments):
    process = start(*arguments)
    _, err = process.communicate(timeout=300)
    return process.returncode, err


def metrics(run):
    return [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("tuning", ["lora", "qlora", "full"])
def test_each_tuning_learns_and_leaves_sound_weights(recipe, runs, tuning):
    assert finish("prepare", recipe, f"train.tuning={tuning}")[0] == 0
    code, err = finish("train", recipe, f"train.tuning={tuning}")
    assert code == 0, err
    run = runs / "tiny"
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    held_out = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line]
    assert losses[-1] < losses[0] - 0.3
    *_, last = [line for line in metrics(run) if "loss" in line]
    assert last["eta_seconds"] == 0
    assert last["tokens_per_second"] > 10
    assert 0.1 < last["memory_gib"] < 8
    assert held_out[-1] < held_out[0]
    assert (run / "train" / "loss.png").stat().st_size > 5000
    if tuning == "full":
        assert len(read_header(run / "train/model/model.safetensors").tensors) == 20
    else:
        tensors = read_header(run / "train/adapter/adapter_model.safetensors").tensors
        assert len(tensors) == 2 * 7 * 2  # A and B of seven linear layers in two blocks
        assert all(info.size for info in tensors.values())
        assert (run / "train/adapter/tokenizer.json").is_file()
    assert not list((run / "train").glob("[am]*/*.bin"))  # no pickles among what later modes read


def test_a_stop_request_saves_and_the_same_command_goes_on(recipe, runs):
    assert finish("prepare", recipe)[0] == 0
    run = runs / "tiny"
    process = start("train", recipe)
    wait_for(lambda: (run / "train/metrics.jsonl").is_file())
    (run / "train/stop-requested").touch()
    _, err = process.communicate(timeout=120)
    assert process.returncode == Exit.STOPPED, err
    assert "stopped as asked after step" in err
    assert "Traceback" not in err
    stopped = json.loads((run / "manifest.json").read_text())["modes"]["train"]
    assert 1 <= stopped["step"] < 12
    assert not stopped["complete"]
    code, err = finish("train", recipe)
    assert code == 0, err
    assert f"from checkpoint-{stopped['step']}" in err
    assert [line["step"] for line in metrics(run) if "loss" in line] == list(range(1, 13))
    # A third start has nothing to do and says so.
    code, err = finish("train", recipe)
    assert code == 0
    assert "is complete" in err


def test_sigterm_is_a_stop_request(recipe, runs):
    assert finish("prepare", recipe)[0] == 0
    process = start("train", recipe)
    wait_for(lambda: (runs / "tiny/train/metrics.jsonl").is_file())
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == Exit.STOPPED, err


def test_a_killed_training_ends_as_one_that_was_not(recipe, runs):
    """Same data order, optimizer, scheduler: the adapter of a killed and resumed run equals that of a whole one."""
    import torch
    from safetensors.torch import load_file

    assert finish("prepare", recipe)[0] == 0
    assert finish("prepare", recipe, "--run", "whole")[0] == 0
    assert finish("train", recipe, "--run", "whole")[0] == 0
    process = start("train", recipe)
    wait_for(lambda: (runs / "tiny/train/checkpoints/checkpoint-3/complete.json").is_file())
    process.kill()
    process.communicate()
    half = runs / "tiny/train/checkpoints/checkpoint-11"  # a save that the kill cut short
    half.mkdir(exist_ok=True)
    (half / "complete.json").unlink(missing_ok=True)
    code, err = finish("train", recipe)
    assert code == 0, err
    assert "checkpoint-11 was not saved to its end" in err
    one = load_file(runs / "whole/train/adapter/adapter_model.safetensors")
    two = load_file(runs / "tiny/train/adapter/adapter_model.safetensors")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-5), name


@pytest.mark.parametrize(
    ("override", "code", "what"),
    [
        ("train.args.lr_scheduler_type=cosin", Exit.USAGE, "cosin"),
        ("train.lora.r=0", Exit.USAGE, "r"),
        ("train.lora.target_modules=[nothing_proj]", Exit.USAGE, "nothing_proj"),
    ],
)
def test_what_a_library_refuses_is_three_lines(recipe, runs, override, code, what):
    assert finish("prepare", recipe)[0] == 0
    found, err = finish("train", recipe, override)
    assert found == code, err
    assert what in err
    assert "Traceback" not in err
    assert [line[:6] for line in err.splitlines()[-3:]] == ["error:", "where:", "fix:  "]


def test_a_model_that_changed_since_prepare_is_refused(recipe, runs):
    assert finish("prepare", recipe)[0] == 0
    config = runs / "tiny/prepare/tokenizer/chat_template.jinja"
    config.write_text(config.read_text() + " ")
    code, err = finish("train", recipe)
    assert code == Exit.PREFLIGHT
    assert "chat_template_sha256 was" in err
