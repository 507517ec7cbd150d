"""Starts one training again and again and kills it at random moments; what test_train_kills.py runs.

    python training_kills.py RECIPE RUN KILLS SEED

Each attempt is a fork of this process, in which the libraries are imported already: an attempt takes seconds, and most
kills meet work instead of imports. Prints a JSON line: attempts, and of each killed one the step that it had saved.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import matplotlib.figure
import peft.tuners.lora
import torch
import transformers.models.llama.modeling_llama
import trl.trainer.sft_trainer

from wherry.__main__ import main
from wherry.rundir import runs_root
from wherry.train import checkpoints

IMPORTED_ONCE = (matplotlib.figure, peft.tuners.lora, transformers.models.llama.modeling_llama, trl.trainer.sft_trainer)

torch.set_num_threads(1)


def attempt(arguments: list[str]) -> int:
    """Pid of a process that trains."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.environ["ATTEMPTS_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os._exit(main(arguments))
    return pid


def logged(metrics: Path) -> int:
    """Steps that the newest attempts have logged."""
    return len(metrics.read_bytes().splitlines()) if metrics.is_file() else 0


def loop(recipe: str, run: str, kills: int, seed: int) -> None:
    arguments = ["train", recipe, "--run", run]
    folder = runs_root() / run / "train"
    rng = random.Random(seed)
    seen: list[int] = []
    for _ in range(kills):
        # Counted in steps: in seconds, a slow machine would always be killed before it begins. The rest is chance.
        steps, rest = rng.randrange(0, 9), rng.uniform(0, 0.3)
        pid, done, before = attempt(arguments), 0, logged(folder / "metrics.jsonl")
        while not done and logged(folder / "metrics.jsonl") in range(before, before + steps):
            done, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.002)
        time.sleep(rest)
        if not done:
            done, status = os.waitpid(pid, os.WNOHANG)
        if done:  # the run is complete, or cannot go on
            print(json.dumps({"kills": seen, "code": os.waitstatus_to_exitcode(status)}))
            return
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        newest = checkpoints.newest_complete(folder / "checkpoints")
        seen.append(int(newest.name.rpartition("-")[2]) if newest else 0)
    _, status = os.waitpid(attempt(arguments), 0)
    print(json.dumps({"kills": seen, "code": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    Path(os.environ["ATTEMPTS_LOG"]).touch()
    loop(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
