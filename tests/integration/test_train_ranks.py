"""Several ranks with the real DeepSpeed and gloo: split, stopped, resumed; and refused where nothing was split."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wherry.errors import Exit

# "--": torchrun would take --run for an abbreviation of an option of its own.
TORCHRUN = [str(Path(sys.prefix) / "bin/torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python", "--"]
WHERRY = [sys.executable, "-m", "wherry"]


@pytest.fixture
def recipe(tmp_path, tiny_chat_model, runs, monkeypatch):
    monkeypatch.setenv("WHERRY_DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for i in range(64):
            turns = [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": str(i + 1)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {{name: {tiny_chat_model}}}\n"
        f"data: {{train: {rows}}}\n"
        "train:\n"
        "  args: {learning_rate: 1e-2, per_device_train_batch_size: 2, max_steps: 8, save_steps: 2,\n"
        "         logging_steps: 1, gradient_checkpointing: false}\n"
    )
    return path


def finish(*arguments, launcher=(*TORCHRUN, *WHERRY)):
    done = subprocess.run([*launcher, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def prepared(recipe, *overrides):
    code, err = finish("prepare", recipe, *overrides, launcher=WHERRY)
    assert code == 0, err


def losses(run):
    lines = (run / "train/metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.parametrize("tuning", ["lora", "qlora", "full"])
def test_sharded_and_unsharded_training_learn_the_same(recipe, runs, tuning):
    rate = "train.args.learning_rate=5e-4" if tuning == "full" else "train.args.learning_rate=2e-3"
    for sharding in ("none", "zero3"):
        name = ["--run", sharding, f"train.sharding={sharding}", f"train.tuning={tuning}", rate]
        prepared(recipe, *name)
        code, err = finish("train", recipe, *name)
        assert code == 0, err
        assert f"2 ranks, sharding {sharding}" in err
        if sharding == "zero3":
            share = float(re.search(r"a rank holds .* of weights \((.*)%\)", err)[1])
            assert share == pytest.approx(50, abs=2.5)  # norms stay whole
    whole, split = losses(runs / "none"), losses(runs / "zero3")
    assert len(whole) == len(split) == 8
    # bfloat16 adapters under ZeRO-3, float32 without: near, not equal.
    assert split == pytest.approx(whole, abs=0.1)
    assert whole[-1] < whole[0] - 0.1


@pytest.mark.parametrize("tuning", ["lora", "qlora"])
def test_a_sharded_training_stops_and_goes_on(recipe, runs, tuning):
    words = ["train.sharding=zero3", f"train.tuning={tuning}"]
    prepared(recipe, *words)
    run = runs / "tiny"
    process = subprocess.Popen(
        [*TORCHRUN, *WHERRY, "train", str(recipe), *words],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    while not (run / "train/metrics.jsonl").is_file():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    (run / "train/stop-requested").touch()
    process.communicate(timeout=120)
    assert process.returncode != 0
    stopped = json.loads((run / "manifest.json").read_text())["modes"]["train"]
    assert 1 <= stopped["step"] < 8
    assert "stopped as asked" in stopped["ended_by"]
    code, err = finish("train", recipe, *words)
    assert code == 0, err
    assert f"from checkpoint-{stopped['step']}" in err
    assert len(losses(run)) == 8


@pytest.mark.parametrize(("sharding", "before", "after"), [("zero3", 3, 2), ("zero3", 2, 3), ("none", 3, 2)])
def test_another_number_of_ranks_goes_on(recipe, runs, sharding, before, after):
    """The same rows make a step and the optimizer is put together: the adapter is that of a run that kept its ranks."""
    from safetensors.torch import load_file

    def words(ranks, name):
        args = {"learning_rate": 2e-3, "save_steps": 4, "per_device_train_batch_size": 6 // ranks}
        overrides = [f"train.args.{key}={value}" for key, value in args.items()]
        return ["train", recipe, "--run", name, f"train.sharding={sharding}", *overrides]

    def launcher(ranks):
        return (*TORCHRUN[:3], str(ranks), *TORCHRUN[4:], *WHERRY)

    for name in ("whole", "cut"):
        prepared(recipe, "--run", name)
    code, err = finish(*words(before, "whole"), launcher=launcher(before))
    assert code == 0, err
    shutil.copytree(runs / "whole/train", runs / "cut/train")
    for later in ("checkpoints/checkpoint-8", "adapter"):
        shutil.rmtree(runs / "cut/train" / later)
    (runs / "cut/train/complete.json").unlink()
    code, err = finish(*words(after, "cut"), launcher=launcher(after))
    assert code == 0, err
    assert f"checkpoint-4 was saved by {before} ranks, now there are {after}" in err
    assert "rows until" not in err
    one, two = (load_file(runs / name / "train/adapter/adapter_model.safetensors") for name in ("whole", "cut"))
    apart = sum((tensor.float() - two[name].float()).norm() ** 2 for name, tensor in one.items()) ** 0.5
    learned = sum(tensor.float().norm() ** 2 for name, tensor in one.items() if "lora_B" in name) ** 0.5
    assert apart < 0.02 * learned  # bfloat16 sums over other groups of rows


def test_a_rank_that_hangs_ends_the_training_and_shows_where(recipe, runs, tmp_path):
    prepared(recipe)
    script = tmp_path / "hang.py"
    script.write_text(
        "import os, sys, time\n"
        "from wherry.train import progress\n"
        "agreed = progress.Stop._agreed\n"
        "calls = []\n"
        "def stuck_here(self, args):\n"
        "    calls.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(calls) == 3:\n"
        "        time.sleep(600)\n"
        "    return agreed(self, args)\n"
        "progress.Stop._agreed = stuck_here\n"
        "from wherry.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["train", recipe, "train.hang_timeout=8"]
    code, err = finish(*words, launcher=[*TORCHRUN, sys.executable, str(script)])
    assert code != 0
    assert "made no progress for 8 s after step 2" in err
    assert f"exitcode  : {int(Exit.STOPPED)}" in err
    (runs / "tiny/train/stop-requested").touch()  # what torchrun's SIGTERM to the other rank may leave
    assert "stuck_here" in (runs / "tiny/train/hang/rank-1.txt").read_text()
    code, err = finish("train", recipe)
    assert code == 0, err
    assert "from checkpoint-2" in err


def test_a_model_loaded_before_the_configuration_is_refused(recipe, runs, tmp_path):
    """The classic mistake, made on purpose: ZeRO-3 does not engage, and nothing but this check says so."""
    prepared(recipe, "train.sharding=zero3")
    script = tmp_path / "mistake.py"
    script.write_text(
        "import sys\n"
        "from wherry.train import config, model\n"
        "late = config.training_args\n"
        "early = model.load\n"
        "class Early:\n"
        "    model = None\n"
        "def load_first(run, **more):\n"
        "    from transformers import AutoModelForCausalLM\n"
        "    Early.model = AutoModelForCausalLM.from_pretrained(run.dir('prepare') / 'model')\n"
        "    return late(run, **more)\n"
        "config.training_args = load_first\n"
        "model.load = lambda run, rank: Early.model\n"
        "from wherry.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    launcher = [*TORCHRUN, sys.executable, str(script)]
    code, err = finish("train", recipe, "train.sharding=zero3", launcher=launcher)
    assert code != 0
    assert "ZeRO-3 did not split the model" in err
    assert "loaded after TrainingArguments" in err
    assert f"exitcode  : {int(Exit.PREFLIGHT)}" in err
