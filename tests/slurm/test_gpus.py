"""Every usual way to ask Slurm for the GPUs of a node either works, or is refused within seconds with its cure."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.parametrize("cluster", ["loop", "constrained"], indirect=True)

EIGHT = ("-N1", "--ntasks-per-node=8", "--gpus-per-node=0")
"""One task a GPU. --gpus-per-node=0 takes back what slurm/train.sh asks for itself."""

ONE = ("-N1", "--ntasks-per-node=8", "--gpus-per-node=8")
THREE = ("-N3", "--ntasks-per-node=8")
STEP = "--ntasks=3 --ntasks-per-node=1"

# sbatch's options, srun's options, ranks (0: refused), what a refusal names
WAYS = [
    (ONE, "", 8, ""),
    ((*EIGHT, "--gpus-per-task=1"), "", 8, ""),
    (ONE, "--gpus-per-task=1", 0, "--gpus-per-task"),
    ((*EIGHT, "--gpus-per-task=1"), "--gpu-bind=none", 8, ""),
    ((*ONE, "--gpu-bind=none"), "", 8, ""),
    ((*ONE, "--gpu-bind=single:1"), "", 8, ""),
    ((*ONE, "--gpu-bind=closest"), "", 8, ""),
    ((*EIGHT, "--gres=gpu:8"), "", 8, ""),
    (("-N1", "--ntasks-per-node=8", "--gpus-per-node=4"), "", 0, "--ntasks-per-node"),
    (("-N3", "--ntasks-per-node=1", "--gpus-per-node=8"), "", 24, ""),
    (("-N3", "--ntasks-per-node=1", "--gpus-per-node=0", "--gpus-per-task=8"), "", 24, ""),
    ((*THREE, "--gpus-per-node=8"), STEP, 24, ""),
    ((*THREE, "--gpus-per-node=0", "--gpus-per-task=1"), STEP, 24, ""),
    # Bindings given to srun itself, which it obeys.
    (ONE, "--gpu-bind=single:1", 0, "--gpu-bind"),
    (("-N3", "--ntasks-per-node=1", "--gpus-per-node=8"), "--gpus-per-task=1", 24, ""),
    (("-N1", "--ntasks-per-node=4", "--gpus-per-node=8"), "", 0, "--ntasks-per-node"),
]
NAMES = [" ".join((*sbatch, "srun", srun)) for sbatch, srun, _, _ in WAYS]


@pytest.mark.parametrize(("sbatch", "srun", "ranks", "named"), WAYS, ids=NAMES)
def test_a_way_to_ask_for_gpus(cluster, stand_in, sbatch, srun, ranks, named):
    job = cluster.sbatch(*sbatch, "slurm/train.sh", WHERRY_SRUN_ARGS=srun, **stand_in)
    state = job.wait(timeout=90)
    if not ranks:
        assert (state, job.exit_code) == ("FAILED", 3), job.log
        refusal = [line for line in job.log.splitlines() if line.startswith("fix: ")]
        assert len(refusal) == 1, job.log
        assert named in refusal[0]
        assert job.seconds < 10
        return
    assert (state, job.exit_code) == ("COMPLETED", 0), job.log
    seen = [json.loads(text) for text in re.findall(r'\{"rank.*?\}', job.log)]  # 24 writers share lines
    assert {rank["rank"] for rank in seen} == set(range(ranks))
    assert {rank["local_rank"] for rank in seen} == set(range(8))
    assert {rank["world_size"] for rank in seen} == {ranks}
    assert {rank["visible_gpus"] for rank in seen} == {8}, job.log
    for rank in seen:
        assert rank["host"] == f"n{rank['rank'] // 8 + 1}"
        assert rank["local_rank"] == rank["rank"] % 8
