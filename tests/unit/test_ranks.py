"""What a rank refuses before weights are read."""

import pytest

from wherry import ranks
from wherry.errors import Exit, WherryError, run

RANK = ranks.Rank(rank=9, local_rank=1, world_size=16, local_world_size=8)


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """A Slurm job with eight GPUs a node, of which this task sees all, and no driver."""
    for name in ("SLURM_GPUS_PER_TASK", "WHERRY_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("SLURM_JOB_ID", "7"), ("WHERRY_GPUS_PER_NODE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


def refusal():
    with pytest.raises(WherryError) as caught:
        ranks.check(RANK)
    assert caught.value.code == Exit.PREFLIGHT
    return caught.value


def test_gpus_of_the_job_that_the_container_cannot_use(monkeypatch):
    monkeypatch.setattr(ranks, "has_gpu", lambda: False)
    error = refusal()
    assert error.what == "the job has 8 GPUs on this node, and this container can use none"
    assert "--nv" in error.fix
    monkeypatch.setattr(ranks, "has_gpu", lambda: True)
    ranks.check(RANK)


def test_one_gpu_for_eight_ranks_names_the_option(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    error = refusal()
    assert error.what == "this task sees 1 GPU, the node's share of the job is 8"
    assert "--gpu-bind=none" in error.fix
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert "--gpus-per-task=1 by --gpus-per-node" in refusal().fix


def test_on_the_cpu_nothing_is_asked_of_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("WHERRY_DEVICE", "cpu")
    ranks.check(RANK)


def test_a_mistake_that_all_ranks_make_is_said_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WHERRY_EXITS", str(tmp_path))

    def of_rank(number, what):
        monkeypatch.setenv("RANK", str(number))

        def fail():
            raise WherryError(what, f"rank {number}", "do this", Exit.PREFLIGHT)

        assert run(fail) == Exit.PREFLIGHT
        return capsys.readouterr().err

    assert of_rank(0, "one thing").splitlines()[1] == "where: rank 0"
    assert of_rank(1, "one thing") == ""
    assert "where: rank 2" in of_rank(2, "another thing")
    monkeypatch.setenv("WHERRY_EXITS", str(tmp_path / "gone"))
    assert "where: rank 3" in of_rank(3, "one thing")
