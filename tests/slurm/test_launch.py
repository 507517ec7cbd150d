"""Submission from the wrong place, ranks over nodes and networks, exit codes, and what a job's last state says."""

from __future__ import annotations

import re

import pytest


def refused(job, code, what, where, fix):
    assert job.wait(timeout=60) == "FAILED"
    assert job.seconds < 10
    assert job.exit_code == code, job.log
    error, place, cure = [line for line in job.log.splitlines() if line.startswith(("error:", "where:", "fix:"))]
    assert what in error
    assert where in place
    assert fix in cure


class TestRefusals:
    def test_submitted_from_elsewhere(self, cluster):
        home = cluster.folder / "home"
        job = cluster.sbatch(cluster.checkout / "slurm/train.sh", cwd=home)
        refused(job, 3, "not the project's root", str(home), "cd to the folder that holds slurm/")

    def test_no_image(self, cluster, stand_in):
        job = cluster.sbatch("slurm/train.sh", **(stand_in | {"WHERRY_SIF": "nowhere.sif"}))
        refused(job, 3, "no image nowhere.sif", str(cluster.checkout), "make sif")

    def test_no_apptainer(self, cluster):
        job = cluster.sbatch("slurm/train.sh", WHERRY_APPTAINER="no-such-program")
        refused(job, 3, "no no-such-program on n1", "PATH", "WHERRY_MODULES")

    def test_unknown_recipe(self, cluster, stand_in):
        job = cluster.sbatch("slurm/train.sh", "recipes/none.yaml", **stand_in)
        refused(job, 2, "no recipe recipes/none.yaml", str(cluster.checkout), "recipes/demo.yaml")

    def test_unknown_run(self, cluster, stand_in):
        job = cluster.sbatch("slurm/train.sh", "--run", "nobody", **stand_in)
        refused(job, 2, "no run 'nobody'", "runs/nobody", "recipes/demo.yaml")

    def test_a_setting_that_is_none(self, cluster, stand_in):
        job = cluster.sbatch("slurm/train.sh", "LD_PRELOAD=x.so", **stand_in)
        refused(job, 2, "no setting LD_PRELOAD", "command line", "small letters")


@pytest.mark.parametrize("cluster", ["loop", "netns", "four-gpus"], indirect=True)
class TestRanks:
    @pytest.mark.parametrize("tasks", [1, 2])
    def test_ranks_over_three_nodes_agree(self, cluster, training, tasks):
        """Two ranks a node: from torchrun in one task, and from two tasks."""
        network = cluster.settings.get("NET") == "netns"
        interface = cluster.settings.get("INTERFACE", "eth0") if network else "lo"
        options = ["-N3", f"--ntasks-per-node={tasks}", f"--gpus-per-node={cluster.settings.get('GPUS', 8)}"]
        job = training(*options, WHERRY_NPROC_PER_NODE="2", STEPS="2")
        assert job.wait(timeout=120) == "COMPLETED", job.log
        seen = r"rank (\d) of 6 on (n\d): MASTER_ADDR=(\w+) GLOO_SOCKET_IFNAME=(\S+) NCCL_SOCKET_IFNAME=(\S+)"
        lines = re.findall(seen, job.log)
        assert sorted(lines) == [(str(i), f"n{i // 2 + 1}", "n1", interface, f"={interface}") for i in range(6)]
        assert job.steps() == [(0, 1, 6), (0, 2, 6)]


class TestExitCodes:
    @pytest.mark.parametrize("code", [2, 3, 4, 75])
    @pytest.mark.parametrize("tasks", [1, 2])
    def test_the_code_of_the_rank_that_was_wrong_is_that_of_the_job(self, training, code, tasks):
        limit = {"WHERRY_MAX_RESTARTS": "0"} if code == 75 else {}
        words = {"FAIL_RANK": "1", "FAIL_CODE": str(code)}
        job = training("-N1", f"--ntasks-per-node={tasks}", WHERRY_NPROC_PER_NODE="2", **words, **limit)
        assert job.wait(timeout=90) == "FAILED"
        assert job.exit_code == code, job.log
        assert "the message of the rank that was wrong" in job.log

    def test_a_crash_is_a_failure(self, training):
        job = training("-N2", "--ntasks-per-node=1", FAIL_RANK="1", FAIL_CODE="9")
        assert job.wait(timeout=90) == "FAILED"
        assert job.exit_code != 0


def test_the_doctor_looks_from_every_node(cluster, stand_in):
    """The real doctor, on the ranks that training would have."""
    variables = stand_in | {"WHERRY_DEVICE": "cpu", "WHERRY_NPROC_PER_NODE": "1"}
    job = cluster.sbatch("-N3", "--gpus-per-node=1", "slurm/doctor.sh", "recipes/demo.yaml", **variables)
    assert job.wait(timeout=180) == "FAILED"
    assert job.exit_code == 3, job.log
    assert re.search(r"^ +n1 +n2 +n3$", job.log, re.MULTILINE), job.log
    assert re.search(r"^network.allreduce +ok", job.log, re.MULTILINE), job.log
    assert "FAIL recipe.staged on n1" in job.log
    assert "FAIL network.address on n1, n2, n3" in job.log  # these nodes are addresses of one loopback
    assert "Traceback" not in job.log
