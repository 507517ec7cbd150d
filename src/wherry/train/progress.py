"""What a running training tells, and how it is asked to stop."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from wherry.train.metrics import read_metrics


class Stop(TrainerCallback):
    """Save and stop at a step's end once asked to: by a file (it survives srun, apptainer and torchrun) or SIGTERM."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requested = False

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        previous = signal.signal(signal.SIGTERM, lambda *_: self.path.touch())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _agreed(self, args: Any) -> bool:
        """Whether any rank sees the request: ranks must stop at the same step, and a shared file system has delays."""
        asked = self.path.exists()
        if args.world_size == 1:
            return asked
        import torch

        flag = torch.tensor([int(asked)], device=args.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._agreed(args):
            self.requested = True
            control.should_save = control.should_training_stop = True


class Metrics(TrainerCallback):
    """One JSON line per log: step, loss, learning_rate, grad_norm, num_tokens, seconds since the start."""

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        self.started = time.time()
        self.resumed = resumed

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Lines behind the checkpoint that training goes on from would otherwise be there twice.
        if self.path.is_file() and state.is_world_process_zero:
            if not self.resumed:
                return self.path.unlink()
            lines = [line for line in read_metrics(self.path) if line["step"] <= state.global_step]
            self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            line = {"step": state.global_step, "seconds": round(time.time() - self.started, 2), **logs}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def save_picture(metrics: Path, path: Path) -> None:
    from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for key, label in (("loss", "training"), ("eval_loss", "held-out")):
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
