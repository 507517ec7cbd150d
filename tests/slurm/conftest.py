"""A real cluster for each file: three nodes of eight fake GPUs, in four kinds. Needs root; installs Slurm by itself.

Files may run beside each other (pytest -n 2 --dist loadfile): most of the time jobs wait for Slurm.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "containers"))
import fixtures
from cluster import USER, Cluster, Training

host, base, apptainer, sif_of_recipe = fixtures.host, fixtures.base, fixtures.apptainer, fixtures.sif_of_recipe

KINDS = {
    "loop": {},
    "constrained": {"CONSTRAINED": "yes"},
    "netns": {"NET": "netns"},
    "four-gpus": {"NET": "netns", "GPUS": "4", "CPUS": "16", "INTERFACE": "ib0"},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: the others run beside it."""
    items.sort(key=lambda item: item.path.name != "test_real.py")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The kind that the module or the parameter names; default: loop."""
    if os.geteuid() != 0:
        pytest.skip("LOUD: a Slurm cluster of our own needs root")
    kind = getattr(request, "param", "loop")
    beside = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    folder = Path(f"/var/tmp/wherry-slurm-{beside}-{kind}")
    # Job ids differ as well: ports follow from them.
    made = Cluster(folder, {"PORT": str(17000 + 100 * beside), "FIRST_JOB": str(1 + 1000 * beside), **KINDS[kind]})
    if folder.exists():  # of a run that was killed
        made.stop()
    try:
        made.start()
        yield made
    finally:
        if logs := os.environ.get("WHERRY_SLURM_LOGS"):
            shutil.copytree(folder / "log", Path(logs) / kind, dirs_exist_ok=True)
        made.stop()


@pytest.fixture
def stand_in(cluster: Cluster) -> dict[str, str]:
    """Variables of a job whose container is the host, and whose `wherry train` is that of STAND_IN_TRAIN."""
    image = cluster.checkout / "build/wherry.sif"
    image.parent.mkdir(exist_ok=True)
    image.write_text("stand-in")
    here = cluster.checkout / "tests/slurm/stand_in"
    return {
        "WHERRY_APPTAINER": str(here / "apptainer"),
        "WHERRY_PREFIX": str(here),
        "STAND_IN_TRAIN": "-m wherry.ranks",
    }


@pytest.fixture
def training(cluster: Cluster, stand_in: dict[str, str]) -> Iterator[Callable[..., Training]]:
    """Submits a stand-in training with sbatch's options and the job's variables. One rank a node unless they say."""
    shutil.rmtree(cluster.checkout / "runs/demo", ignore_errors=True)

    def submit(*options: str, **env: str) -> Training:
        variables = {"STEPS": "5", "WHERRY_NPROC_PER_NODE": "1", "WHERRY_DEVICE": "cpu", **stand_in, **env}
        variables["STAND_IN_TRAIN"] = "tests/slurm/training.py"
        job = cluster.sbatch(*options, "slurm/train.sh", **variables)
        return Training(job.cluster, job.id, job.folder)

    yield submit
    cluster.user("scancel", f"--user={USER}")
