"""Faults of a launch, made on the real cluster, each caught by the doctor's ranks. GPUs are fake device nodes."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.parametrize("cluster", ["constrained"], indirect=True)

TWO = ("-N1", "--ntasks-per-node=2", "--gpus-per-node=2")


def doctor(cluster, stand_in, *options, **env):
    job = cluster.sbatch(*options, "slurm/doctor.sh", "recipes/demo.yaml", **stand_in, **env)
    job.wait(timeout=240)
    return job


def test_ranks_that_each_see_one_gpu(cluster, stand_in):
    job = doctor(cluster, stand_in, *TWO, WHERRY_SRUN_ARGS="--gpu-bind=single:1")
    assert job.exit_code == 3, job.log
    assert re.search(r"FAIL device.visible on n1 \(rank 0\)", job.log), job.log
    assert "this task sees 1 GPU, the node's share of the job is 2" in job.log
    assert "--gpu-bind" in re.search(r"FAIL device.visible.*?fix: +(.*?)\n", job.log, re.DOTALL)[1]
    assert "Traceback" not in job.log


def test_a_step_that_hides_gpus_by_gpus_per_task(cluster, stand_in):
    job = doctor(cluster, stand_in, *TWO, WHERRY_SRUN_ARGS="--gpus-per-task=1")
    assert job.exit_code == 3, job.log
    assert "leave out --gpus-per-task" in re.search(r"FAIL device.visible.*?fix: +(.*?)\n", job.log, re.DOTALL)[1]


def test_ranks_that_see_all_gpus_have_nothing_to_say_of_them(cluster, stand_in):
    job = doctor(cluster, stand_in, *TWO)
    assert re.search(r"^device.visible +ok +2 visible", job.log, re.MULTILINE), job.log
    assert "FAIL device.visible" not in job.log
