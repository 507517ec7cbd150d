"""Ends a training that hangs: a rank that waits for ever for another one burns the whole job's time in silence."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from wherry.errors import Exit, WherryError
from wherry.ranks import Rank


class Watchdog(TrainerCallback):
    """No step, evaluation batch or save for `limit` seconds: every rank writes its stacks and ends with exit code 75.

    folder/rank-N.txt            Python stacks of all threads
    folder/rank-N.nccl.pickle    the last collectives, where NCCL keeps them (TORCH_FR_BUFFER_SIZE), for torchfrtrace
    """

    def __init__(self, folder: Path, limit: float, rank: Rank) -> None:
        self.folder, self.limit, self.rank = folder, limit, rank
        self.seen, self.step = time.monotonic(), 0
        self.over = threading.Event()

    def alive(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen, self.step = time.monotonic(), state.global_step

    on_train_begin = on_step_end = on_substep_end = on_prediction_step = on_evaluate = on_save = alive

    @contextmanager
    def watching(self) -> Iterator[None]:
        """limit 0 watches nothing."""
        if self.limit > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            self.over.set()

    def _watch(self) -> None:
        while not self.over.wait(min(1.0, self.limit / 4)):
            if time.monotonic() - self.seen > self.limit:
                self._end()

    def _end(self) -> None:
        with suppress(OSError):  # a full disk must not keep it alive
            self._write()
        error = WherryError(
            f"rank {self.rank.rank} made no progress for {self.limit:.0f} s after step {self.step}",
            f"{self.folder}: the stacks of all ranks; the rank that waits for nobody is the one to look at",
            "the same command goes on from the newest checkpoint; train.hang_timeout sets the limit",
            Exit.STOPPED,
        )
        print(error, file=sys.stderr, flush=True)
        os._exit(error.code)  # the main thread hangs: nothing softer ends it

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"rank-{self.rank.rank}.txt").open("w") as file:
            file.write(f"rank {self.rank.rank} of {self.rank.world_size}, after step {self.step}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        with suppress(AttributeError, RuntimeError):  # a build without NCCL, or NCCL unused
            from torch._C._distributed_c10d import _dump_nccl_trace

            (self.folder / f"rank-{self.rank.rank}.nccl.pickle").write_bytes(_dump_nccl_trace())
