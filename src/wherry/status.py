"""wherry status: where a run stands, in a few lines, from the files of its run directory alone.

On a cluster slurm/here.sh adds what squeue says of the run's jobs (runs/<name>/logs/jobs.txt).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from wherry.cli import open_run, parser
from wherry.rundir import Run
from wherry.serve.state import Phase, read_state
from wherry.train.metrics import read_metrics

RECENT = 20
"""Logged steps from which the time of a step is taken."""


def main(arguments: list[str]) -> int:
    run = open_run(parser("status", __doc__, "wherry status --run demo").parse_args(arguments))
    print(f"run {run.name} in {run.path}")
    for name, text in lines(run):
        print(f"  {name:<12} {text}")
    return 0


def lines(run: Run) -> Iterator[tuple[str, str]]:
    modes = run.manifest()["modes"]
    for mode in ("prepare", "train", "merge", *sorted(m for m in modes if m.startswith("eval/"))):
        yield mode, training(run, modes.get(mode)) if mode == "train" else finished(modes.get(mode))
    if server := read_state(run.dir("serve") / "state.json"):
        text = f"{server.state}, {server.url}, model {server.model}"
        if server.is_abandoned():
            text = f"gone without a word: process {server.supervisor_pid} on {server.host} was {server.state}"
        elif server.state is Phase.FAILED:
            text = f"failed: vLLM {server.reason}"
        elif server.progress:
            text = f"{server.state}: {server.progress}"
        yield "server", text + (f", job {server.job}" if server.job else "")
    yield from jobs(run)


def finished(record: dict[str, Any] | None) -> str:
    if record is None:
        return "not started, or not ended yet"
    if not record.get("complete"):
        return f"not complete: {record.get('ended_by', 'running')[:100]}"
    scores = ", ".join(f"{r['task']} {100 * r['score']:.1f} %" for r in record.get("results", []))
    return f"complete in {duration(record['seconds'])}" + (f": {scores}" if scores else "")


# ---- training --------------------------------------------------------------------------------------------------------


def training(run: Run, record: dict[str, Any] | None) -> str:
    path = run.dir("train") / "metrics.jsonl"
    steps = [line for line in read_metrics(path) if "loss" in line] if path.is_file() else []
    if run.is_complete("train") or not steps:
        return finished(record)
    now, last = steps[-1], last_step(run, steps)
    text = f"step {now['step']} of {last or '?'}, loss {now['loss']:.4g}"
    if (pace := seconds_per_step(steps)) and last:
        text += f", {pace:.3g} s a step, {duration(pace * (last - now['step']))} left"
    wrote = path.stat().st_mtime
    text += f"; last logged {duration(time.time() - wrote)} ago"
    if record and "ended_by" in record and record["started"] + record["seconds"] >= wrote:
        text += f"; ended by {record['ended_by'][:100]}"
    return text


def last_step(run: Run, steps: list[dict[str, Any]]) -> int | None:
    """The recipe's max_steps, else what the share of the epochs that is done amounts to."""
    args = run.recipe.train.args
    if args.get("max_steps", -1) > 0:
        return int(args["max_steps"])
    epoch = steps[-1].get("epoch")
    return round(steps[-1]["step"] * float(args.get("num_train_epochs", 3)) / epoch) if epoch else None


def seconds_per_step(steps: list[dict[str, Any]]) -> float | None:
    """Over the newest lines of one attempt: `seconds` starts anew with each."""
    recent = steps[-1:]
    for line in reversed(steps[-RECENT:-1]):
        if line["seconds"] >= recent[0]["seconds"]:
            break
        recent.insert(0, line)
    first, last = recent[0], recent[-1]
    return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]) if len(recent) > 1 else None


# ---- jobs ------------------------------------------------------------------------------------------------------------


def jobs(run: Run) -> Iterator[tuple[str, str]]:
    """The newest job of each mode, and its state where squeue was asked: WHERRY_QUEUE, a line "id|text" each."""
    path = run.path / "logs/jobs.txt"
    if not path.is_file():
        return
    newest = dict(line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if " " in line)
    said = (line.partition("|") for line in os.environ.get("WHERRY_QUEUE", "").splitlines())
    queue = {number.strip(): text.strip() for number, _, text in said}
    for mode, number in newest.items():
        yield f"job {number}", f"{mode}: {queue.get(number, 'not in the queue any more, or squeue was not asked')}"


def duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
