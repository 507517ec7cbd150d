"""One real GPU: the chain up to the merge, memory that runs out, and the wrong launch. Skipped aloud without a GPU.

make test-gpu           on a machine with an NVIDIA GPU (tests/integration/test_train.py runs there as well)
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from wherry.device import has_gpu
from wherry.errors import Exit

pytestmark = pytest.mark.skipif(not has_gpu(), reason="LOUD: no NVIDIA GPU is visible here")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights of Llama 3.2 1B's shape, but for the vocabulary: 1.0 B parameters in two shards."""
    import torch
    from chat_tokenizer import chat_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model-1b")
    tokenizer = chat_tokenizer()
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = LlamaForCausalLM(config).to(torch.bfloat16)
    network.save_pretrained(folder, max_shard_size="1GB")
    tokenizer.save_pretrained(folder)
    del network
    torch.cuda.empty_cache()
    return folder


@pytest.fixture
def recipe(tmp_path, model, runs):
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for i in range(64):
            turns = [{"role": "user", "content": f"{i} + 1 " * 40}, {"role": "assistant", "content": str(i + 1)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    path = tmp_path / "one.yaml"
    path.write_text(
        f"model: {{name: {model}}}\n"
        f"data: {{train: {rows}}}\n"
        "train:\n"
        "  tuning: qlora\n"
        "  args: {learning_rate: 1e-3, per_device_train_batch_size: 8, max_steps: 8, save_steps: 4, logging_steps: 1}\n"
    )
    return path


def wherry(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-m", "wherry", *map(str, arguments)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=500,
    )
    return done.returncode, done.stderr


def test_qlora_on_the_gpu_then_merge_on_the_cpu(recipe, runs):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = runs / "one"
    for mode in ("prepare", "train", "merge"):
        code, err = wherry(mode, recipe)
        assert code == 0, err
        if mode == "train":
            assert "qlora on the GPU" in err
    lines = [json.loads(line) for line in (run / "train/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]

    def load(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": 0}).eval()

    ids = torch.randint(0, 256, (2, 64), device="cuda")
    with torch.no_grad():
        merged = load(run / "merge/model")(ids).logits.float()
        base = load(run / "prepare/model")
        plain = base(ids).logits.float()
        adapted = PeftModel.from_pretrained(base, run / "train/adapter")(ids).logits.float()
    # The merged weights are rounded once more: near base + adapter, and nearer to it than the base alone is.
    assert (merged - adapted).norm() < 0.2 * (plain - adapted).norm()


@contextmanager
def left_free(gib):
    """All of the GPU's memory but this much is taken."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - int(gib * 2**30), dtype=torch.uint8, device="cuda")
    yield
    del held
    torch.cuda.empty_cache()


def assert_out_of_memory(code, err, fix):
    assert code == Exit.OUT_OF_MEMORY, err
    assert "Traceback" not in err
    assert "error: out of memory" in err
    assert fix in err


def test_weights_that_do_not_fit_are_refused_before_they_are_read(recipe, runs):
    assert wherry("prepare", recipe)[0] == 0
    with left_free(1):
        assert_out_of_memory(*wherry("train", recipe), "nvidia-smi")
    code, err = wherry("train", recipe)  # nothing was spoilt
    assert code == 0, err


def test_memory_that_runs_out_in_a_step_is_exit_4(recipe, runs):
    assert wherry("prepare", recipe)[0] == 0
    large = "train.args.per_device_train_batch_size=64"
    with left_free(3):
        assert_out_of_memory(*wherry("train", recipe, large), "train.args.per_device_train_batch_size")


def test_a_rank_without_a_gpu_of_its_own_is_refused_before_anything_is_loaded(recipe, runs):
    import torch

    assert wherry("prepare", recipe)[0] == 0
    many = str(torch.cuda.device_count() + 1)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": many, "LOCAL_WORLD_SIZE": many}
    code, err = wherry("train", recipe, **ranks)
    assert code == Exit.PREFLIGHT, err
    assert f"the node's share of the job is {many}" in err
    assert "invalid device ordinal" not in err
