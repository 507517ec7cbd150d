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
    """One JSON line per log: step, loss, learning_rate, grad_norm, num_tokens, and

    seconds            since this process began
    tokens_per_second  of all ranks, since the line before
    mfu                model FLOP utilisation: what the tokens need (flops_per_token) over the GPUs' dense
                       16-bit peak (arXiv:2204.02311); on a known GPU
    memory_gib         the most that this rank's GPU has held; without a GPU, resident memory
    eta_seconds        until max_steps, at the pace since the line before
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        self.started = time.time()
        self.resumed = resumed
        self.before: tuple[float, int, float] | None = None  # seconds, step, tokens of the line before
        self.flops = self.peak = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        from wherry.plan import gpus

        here = gpus.here()
        self.flops = flops_per_token(model)
        self.peak = here.tflops * 1e12 * args.world_size if here.origin == "this machine" else 0.0
        # Lines behind the checkpoint that training goes on from would otherwise be there twice.
        if self.path.is_file() and state.is_world_process_zero:
            if not self.resumed:
                return self.path.unlink()
            lines = [line for line in read_metrics(self.path) if line["step"] <= state.global_step]
            self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            seconds = time.time() - self.started
            line = {"step": state.global_step, "seconds": round(seconds, 2), **logs, **self._pace(seconds, state, logs)}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _pace(self, seconds: float, state: Any, logs: dict[str, Any]) -> dict[str, float]:
        if "loss" not in logs:
            return {}
        now = (seconds, state.global_step, float(logs.get("num_tokens", 0)))
        before, self.before = self.before, now
        found = {"memory_gib": round(_peak_memory() / 2**30, 3)}
        if before is None or now[1] <= before[1]:
            return found
        taken, steps, tokens = (a - b for a, b in zip(now, before, strict=True))
        found["eta_seconds"] = round(taken / steps * (state.max_steps - state.global_step), 1)
        if tokens > 0:
            found["tokens_per_second"] = round(tokens / taken, 1)
            if self.peak:
                found["mfu"] = round(tokens / taken * self.flops / self.peak, 4)
        return found


def flops_per_token(model: Any) -> float:
    """Floating-point operations of forward and backward for a token, without attention and recomputation.

    Two for each parameter that is multiplied with, two more for the gradient of what went in, two for that of a weight
    which is trained (arXiv:2001.08361, section 2.1). Embeddings are looked up, not multiplied.
    """
    from wherry.train.sharding import size

    tied = getattr(model.config, "tie_word_embeddings", False)
    total = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name and not tied:
            continue
        count = size(parameter)
        if type(parameter).__name__ == "Params4bit":  # packed, two to a byte
            count *= 2 * parameter.element_size()
        total += count * (6 if parameter.requires_grad else 4)
    return total


def _peak_memory() -> int:
    """Bytes."""
    import torch

    from wherry.rundir import peak_rss_bytes

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else peak_rss_bytes()


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
