"""Two sites of other GPUs, interfaces and paths, with the same commands; what `make site` writes; refusals."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cluster import USER, Training

PROFILES = Path(__file__).parent / "sites"
ENTRY = {"loop": "eight-gpus", "four-gpus": "four-gpus"}


def kind(cluster):
    return "four-gpus" if cluster.settings.get("GPUS") == "4" else "loop"


def submitted(cluster, stand_in, site, *words):
    """A training of the stand-in on three nodes, with one rank a node."""
    variables = stand_in | {"STAND_IN_TRAIN": "tests/slurm/training.py", "STEPS": "2", "WHERRY_NPROC_PER_NODE": "1"}
    command = ["make", "--silent", "train", f"SITE={site}", "NODES=3", f"ARGS={' '.join(words)}"]
    code, out = cluster.user(*command, WHERRY_DEVICE="cpu", **variables)
    assert code == 0, out
    return Training(cluster, int(out.split()[-1]), cluster.checkout), out


@pytest.mark.parametrize("cluster", ["loop", "four-gpus"], indirect=True)
class TestTwoSites:
    def test_the_same_command(self, cluster, stand_in):
        """No file of the checkout differs but the profile."""
        name = ENTRY[kind(cluster)]
        place_profile(cluster, name, (PROFILES / f"{name}.env").read_text())
        job, out = submitted(cluster, stand_in, name)
        gpus = cluster.settings.get("GPUS", "8")
        assert re.search(rf"SBATCH_GPUS_PER_NODE +{gpus} \(site {name}\)", out)
        assert job.wait(timeout=120) == "COMPLETED", job.log
        assert re.search(rf"srun .*--gpus-per-node={gpus}", job.log)
        if name == "eight-gpus":
            assert re.search(r"WHERRY_RUNS +runs \(default\)", job.log)
            assert "GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME==lo" in job.log
            assert job.steps() == [(0, 1, 3), (0, 2, 3)]
        else:
            runs = cluster.folder / "home/scratch/runs"
            assert re.search(rf"WHERRY_RUNS +{runs} \(site {name}\)", job.log)
            assert "GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME==ib" in job.log
            assert job.show()["TimeLimit"] == "00:30:00"
            assert (runs / "demo/train/steps.txt").read_text() == "0 1 3\n0 2 3\n"

    def test_a_profile_that_make_site_wrote_works_as_written(self, cluster, stand_in):
        code, out = cluster.user("make", "--silent", "site", "NAME=found", timeout=120)
        assert code == 0, out
        written = (cluster.checkout / "slurm/sites/found.env").read_text()
        gpus = cluster.settings.get("GPUS", "8")
        assert f"\nSBATCH_GPUS_PER_NODE={gpus}\n" in written
        assert "\nSBATCH_PARTITION=main\n" in written
        assert f"gpu:{gpus}" in written
        assert "# Seen on a node of main:" in written
        if kind(cluster) == "four-gpus":
            assert re.search(r"interface ib0 10\.77\.0\.\d/24", written)
        job, _ = submitted(cluster, stand_in, "found", f"WHERRY_APPTAINER={stand_in['WHERRY_APPTAINER']}")
        assert job.wait(timeout=120) == "COMPLETED", job.log
        assert (0, 2, 3) in job.steps()
        again, out = cluster.user("make", "--silent", "site", "NAME=found")
        assert again != 0
        assert "there is a profile of that name" in out


def place_profile(cluster, name, text):
    folder = cluster.checkout / "slurm/sites"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.env").write_text(text)
    for path in (folder, folder / f"{name}.env"):
        shutil.chown(path, USER, USER)


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("SBATCH_PARTITON=gpu", "no setting SBATCH_PARTITON", "docs/sites.md"),
        ("SBATCH_GPUS_PER_TASK=1", "no setting SBATCH_GPUS_PER_TASK", "docs/sites.md"),
        ("LD_PRELOAD=evil.so", "no setting LD_PRELOAD", "docs/sites.md"),
        ("export HF_HOME=/x", "not a line NAME=value", "no 'export'"),
        ("HF_HOME = /x", "not a line NAME=value", "no spaces"),
        ("HF_HOME=$(touch hacked)", "HF_HOME is taken as it is written", "write the value itself"),
        ('HF_HOME="/x"', "HF_HOME is taken as it is written", "write the value itself"),
        ("HF_HOME=/x # where", "HF_HOME is taken as it is written", "write the value itself"),
        ("APPTAINERENV_HF_TOKEN=hf_x", "APPTAINERENV_HF_TOKEN looks like a secret", "your own environment"),
        ("trian.SBATCH_QOS=long", "no mode 'trian'", "train"),
        ("touch hacked", "not a line NAME=value", "no commands"),
    ],
)
def test_a_line_that_is_none_is_refused_with_its_number(cluster, stand_in, line, what, fix):
    place_profile(cluster, "bad", f"# a comment\n\nSBATCH_PARTITION=main\n{line}\n")
    code, out = cluster.user("slurm/submit.sh", "train", "SITE=bad", **stand_in)
    assert code == 2
    assert f"error: {what}" in out
    assert "where: slurm/sites/bad.env:4" in out
    assert fix in out
    assert not (cluster.checkout / "hacked").exists()


def test_a_line_for_one_mode_wins_and_what_has_no_gpu_is_not_given_one(cluster, stand_in):
    lines = "train.SBATCH_GPUS_PER_NODE=2\nSBATCH_GPUS_PER_NODE=4\nSBATCH_QOS=normal\nmerge.SBATCH_TIMELIMIT=9\n"
    place_profile(cluster, "modes", lines)
    seen = {}
    for mode in ("train", "eval", "merge"):
        code, out = cluster.user("slurm/submit.sh", "--hold", mode, "recipes/demo.yaml", "SITE=modes", **stand_in)
        assert code == 0, out
        seen[mode] = dict(re.findall(r"(SBATCH_\w+) +(\S+) \(site modes\)", out))
    assert seen["train"] == {"SBATCH_GPUS_PER_NODE": "2", "SBATCH_QOS": "normal"}
    assert seen["eval"] == {"SBATCH_GPUS_PER_NODE": "4", "SBATCH_QOS": "normal"}
    assert seen["merge"] == {"SBATCH_QOS": "normal", "SBATCH_TIMELIMIT": "9"}
    cluster.user("scancel", f"--user={USER}")
