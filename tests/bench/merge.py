"""make bench-merge: wherry merge against PEFT and against a plain copy, on random checkpoints made on the spot.

Prints seconds, ratios and peak memory (ru_maxrss of the process), each peer in a process of its own, in the same run.
Needs 30 GB of disk under --folder (default: TMPDIR) and 16 GB of memory for PEFT. --sizes small: a quick look.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {  # name → LlamaConfig; sizes in bf16
    "1.8B": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=20, num_key_value_heads=8, vocab_size=128256
    ),
    "3.2B": dict(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=24, num_key_value_heads=8, vocab_size=128256
    ),
    "70B shapes, 2 layers": dict(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, num_key_value_heads=8, vocab_size=128256
    ),
    "small": dict(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_key_value_heads=8, vocab_size=32000
    ),
}

MAKE = """
import json, sys, torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
folder, shape = sys.argv[1], json.loads(sys.argv[2])
config = LlamaConfig(num_attention_heads=shape["hidden_size"] // 128, tie_word_embeddings=False, **shape)
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(config)
with torch.no_grad():
    for p in model.parameters():
        p.normal_(0, 0.02)
model.save_pretrained(f"{folder}/base", max_shard_size="2GB")
tuned = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
with torch.no_grad():
    for p in tuned.parameters():
        if p.requires_grad:
            p.normal_(0, 0.02)
tuned.save_pretrained(f"{folder}/adapter")
"""

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out, max_shard_size="2GB")
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", default=os.environ.get("TMPDIR", "/tmp"))
    options.add_argument("--sizes", nargs="*", choices=SHAPES, default=[name for name in SHAPES if name != "small"])
    options.add_argument("--repeat", type=int, default=2, help="the fastest counts")
    chosen = options.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; each time is the fastest of {chosen.repeat}")
    columns = "checkpoint | GB | wherry (s) | PEFT (s) | PEFT + sync (s) | cp -r + sync (s) | PEFT ÷ wherry"
    print(f"| {columns} | wherry ÷ cp | peak wherry (GB) | peak PEFT (GB) |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for name in chosen.sizes:
        with tempfile.TemporaryDirectory(prefix="bench-merge.", dir=chosen.folder) as folder:
            measure(name, Path(folder), chosen.repeat)


def measure(name: str, folder: Path, repeat: int) -> None:
    call([sys.executable, "-c", MAKE, str(folder), json.dumps(SHAPES[name])])
    size = sum(path.stat().st_size for path in (folder / "base").glob("*.safetensors"))
    ours, peft, peft_sync, copy = [], [], [], []
    for _ in range(repeat):  # in turn, so that a busy minute of the machine does not fall on one alone
        copy.append(timed(folder / "copy", ["cp", "-r", str(folder / "base"), str(folder / "copy")], sync=True))
        run = make_run(folder)
        ours.append(timed(run, [sys.executable, "-P", "-m", "wherry", "merge", "--run", "bench"], sync=False, runs=run))
        command = [sys.executable, "-c", PEFT, str(folder / "base"), str(folder / "adapter"), str(folder / "peft")]
        peft.append(timed(folder / "peft", command, sync=False, then=peft_sync))
    best = [min(found) for found in (ours, peft, peft_sync, copy)]
    (a, rss), (b, peft_rss), (c, _), (d, _) = best
    rss = max(one[1] for one in ours)
    print(
        f"| {name} | {size / 1e9:.2f} | {a:.1f} | {b:.1f} | {c:.1f} | {d:.1f} | {b / a:.1f} × | {a / d:.2f} × "
        f"| {rss / 1e9:.2f} | {peft_rss / 1e9:.2f} |",
        flush=True,
    )


def make_run(folder: Path) -> Path:
    """A run directory whose prepare and train are complete."""
    from wherry.rundir import Run

    runs = folder / "runs"
    (folder / "bench.yaml").write_text("model: {name: base}\ndata: {train: rows.jsonl}\n")
    os.environ["WHERRY_RUNS"] = str(runs)
    run = Run.open(str(folder / "bench.yaml"), None, [])
    with run.work("prepare"):
        (run.dir("prepare") / "model").symlink_to(folder / "base")
        (run.dir("prepare") / "tokenizer").mkdir()
    with run.work("train"):
        (run.dir("train") / "adapter").symlink_to(folder / "adapter")
    return runs


def timed(
    result: Path, command: list[str], sync: bool, then: list[tuple[float, int]] | None = None, runs: Path | None = None
) -> tuple[float, int]:
    """Seconds and peak memory (bytes) of a command that makes result, which is removed. Begins with a clean disk.

    then: gets the time with a sync behind it as well.
    """
    os.sync()
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    message = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if sync:
        os.sync()
    seconds = time.monotonic() - started
    if then is not None:
        os.sync()
        then.append((time.monotonic() - started, 0))
    if status:
        sys.exit(f"{command[:4]} failed:\n{message[-2000:]}")
    shutil.rmtree(result)
    return seconds, usage.ru_maxrss * 1024


def call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])


if __name__ == "__main__":
    main()
