"""Stand-in for `wherry train`: ranks that talk by gloo, a step number for a checkpoint, exit 75 on request.

STEPS and STEP_SECONDS are environment variables. Every finished step is a line "attempt step world" in steps.txt.
FAIL_RANK=N: rank N ends with exit code FAIL_CODE at step 3.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
train = Path(os.environ["WHERRY_RUNS"]) / "demo/train"
signal.signal(signal.SIGTERM, lambda *_: (train / "stop-requested").touch())
checkpoint = train / "checkpoint"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
seen = [f"{n}={os.environ.get(n)}" for n in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]
begins = f"rank {rank} of {dist.get_world_size()} on {os.uname().nodename}: {' '.join(seen)} from step {step}\n"
print(begins, end="", flush=True)
while step < int(os.environ["STEPS"]):
    time.sleep(float(os.environ.get("STEP_SECONDS", "0.1")))
    if step == 3 and os.environ.get("FAIL_RANK") == str(rank):
        print("error: the message of the rank that was wrong", file=sys.stderr, flush=True)
        os._exit(int(os.environ["FAIL_CODE"]))
    flags = torch.tensor([float((train / "stop-requested").exists()), rank + 1.0])
    dist.all_reduce(flags)
    assert flags[1] == sum(range(1, dist.get_world_size() + 1)), flags
    step += 1
    if rank == 0:
        with (train / "steps.txt").open("a") as file:
            file.write(f"{os.environ.get('SLURM_RESTART_COUNT', '0')} {step} {dist.get_world_size()}\n")
        part = train / "checkpoint.part"
        part.write_text(str(step))
        part.replace(checkpoint)
    if flags[0]:
        dist.barrier()
        sys.exit(75)
dist.destroy_process_group()
