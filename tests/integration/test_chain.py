"""The main job, as a user runs it: a real pretrained model, real bitsandbytes, TRL, vLLM and inspect-ai."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/demo.yaml"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, demo_gguf):
    return tmp_path_factory.mktemp("chain")


def wherry(runs, *arguments, expect=0):
    done = subprocess.run(
        [ROOT / "entrypoints/entrypoint.sh", *arguments],
        cwd=ROOT,
        env={**os.environ, "WHERRY_RUNS": str(runs)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == expect, done.stderr[-3000:]
    return done


def test_from_a_gguf_file_to_a_score_that_rose(runs):
    # Fewer steps and items than the demo, the same everything else.
    few = ["train.args.max_steps=48", "train.args.save_steps=12", "eval.args.limit=40"]
    run = runs / "demo"
    wherry(runs, "prepare", RECIPE, *few)
    wherry(runs, "eval", RECIPE, *few, "--model", "base")

    killed = subprocess.Popen(
        [ROOT / "entrypoints/entrypoint.sh", "train", RECIPE, *few],
        cwd=ROOT,
        env={**os.environ, "WHERRY_RUNS": str(runs)},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while not (run / "train/checkpoints/checkpoint-12/complete.json").is_file():
        assert killed.poll() is None, "training ended before its first checkpoint"
        time.sleep(0.1)
    killed.kill()
    killed.wait()

    done = wherry(runs, "train", RECIPE, *few)
    assert "from checkpoint-" in done.stderr
    wherry(runs, "merge", "--run", "demo")
    wherry(runs, "eval", "--run", "demo")
    (base,) = json.loads((run / "eval/base/result.json").read_text())
    (tuned,) = json.loads((run / "eval/merged/result.json").read_text())
    assert (base["n"], tuned["n"], tuned["N"]) == (40, 40, 120)
    assert base["interval"][1] < tuned["interval"][0], (base["score"], tuned["score"])
    assert tuned["truncated"] == tuned["errors"] == 0  # it has learned to stop

    state = json.loads((run / "serve/state.json").read_text())
    assert state["state"] == "stopped"
    report = wherry(runs, "report", "--run", "demo")
    assert "| cargo | merged |" in report.stdout
    assert (run / "report/scores.png").is_file()
    manifest = json.loads((run / "manifest.json").read_text())
    assert all(mode["complete"] for mode in manifest["modes"].values())
    key = (run / "serve/api_key").read_text() if (run / "serve/api_key").exists() else None
    assert key is None or key not in "".join(
        p.read_text(errors="replace") for p in run.rglob("*") if p.suffix in (".json", ".log", ".yaml")
    )


def test_the_merged_model_says_in_transformers_what_base_and_adapter_say(runs):
    """The merged weights are rounded to bfloat16 once more than base + adapter: near, and the same greedy answer."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = runs / "demo"
    assert (run / "merge/complete.json").is_file(), "the chain above did not come this far"
    tokenizer = AutoTokenizer.from_pretrained(run / "merge/model")
    merged = AutoModelForCausalLM.from_pretrained(run / "merge/model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(run / "prepare/model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run / "train/adapter")
    item = json.loads((ROOT / "recipes/demo/heldout.jsonl").read_text().splitlines()[0])
    prompt = tokenizer.apply_chat_template(item["input"], add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        one, two = merged(**prompt).logits, adapted(**prompt).logits
        assert torch.nn.functional.cosine_similarity(one, two, dim=-1).min() > 0.999
        answers = [m.generate(**prompt, max_new_tokens=40, do_sample=False) for m in (merged, adapted)]
    assert torch.equal(*answers)
    assert answers[0][0, -1].item() == tokenizer.eos_token_id


def test_the_merged_model_says_in_vllm_what_base_and_adapter_say(runs, monkeypatch):
    import greedy
    from transformers import AutoTokenizer

    from wherry.rundir import Run

    monkeypatch.setenv("WHERRY_RUNS", str(runs))
    run = Run.open(None, "demo", [])
    tokenizer = AutoTokenizer.from_pretrained(run.dir("merge") / "model")
    items = [json.loads(row)["input"] for row in (ROOT / "recipes/demo/heldout.jsonl").read_text().splitlines()[:4]]
    prompts = [tokenizer.apply_chat_template(item, add_generation_prompt=True)["input_ids"] for item in items]
    expected = greedy.adapted(run.dir("prepare") / "model", run.dir("train") / "adapter", prompts, tokens=24)
    end = tokenizer.eos_token_id

    def answers(found):
        """As text, up to the token that ends the turn: behind it, and between two spellings of a word, ties decide."""
        return [tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens) for tokens in found]

    pairs = list(zip(answers(greedy.served(run, prompts, tokens=24)), answers(expected), strict=True))
    assert sum(merged == adapted for merged, adapted in pairs) >= 3, pairs  # bfloat16 against float32
