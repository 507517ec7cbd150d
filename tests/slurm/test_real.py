"""The whole chain on the cluster, in the real SIF: DeepSpeed on three nodes, a power cut, what follows by dependency.

A small random model stands in for a large one; image, Slurm, apptainer, TRL, DeepSpeed, vLLM and inspect-ai are real.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import USER, Cluster, Job
from machine import Sif, say
from safetensors.torch import load_file
from tiny_model import make_tiny_model

pytestmark = [pytest.mark.parametrize("cluster", ["netns"], indirect=True), pytest.mark.timeout(3600)]

STEPS = 16
MARKER = "hf_marker_that_must_not_be_seen"

RECIPE = f"""
model: {{name: tiny/model}}
data: {{train: tiny/rows.jsonl}}
train:
  tuning: lora
  sharding: zero3
  args: {{learning_rate: 2.0e-3, per_device_train_batch_size: 1, max_steps: {STEPS}, save_steps: 2, logging_steps: 1,
         gradient_checkpointing: false}}
serve:
  vllm: {{max_model_len: 256, dtype: bfloat16}}
eval:
  tasks: [tiny/task.py]
  args: {{temperature: 0, max_tokens: 8}}
"""

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sums() -> Task:
    return Task(dataset=[Sample(f"{i} + 1", target=str(i + 1)) for i in range(4)], solver=generate(), scorer=includes())
"""


@dataclass
class Site:
    """A user's checkout with an image, a model, rows and a recipe, and no other settings than the environment's."""

    cluster: Cluster
    environment: dict[str, str]

    def user(self, *words: object, timeout: float = 300) -> str:
        code, out = self.cluster.user(*words, timeout=timeout, **self.environment)
        assert code == 0, out
        return out

    def run(self, name: str) -> Path:
        return self.cluster.checkout / "runs" / name

    def jobs(self, name: str) -> dict[str, Job]:
        lines = (self.run(name) / "logs/jobs.txt").read_text().splitlines()
        return {mode: Job(self.cluster, int(number), self.cluster.checkout) for mode, number in map(str.split, lines)}

    def step(self, name: str) -> int:
        """Steps that were logged and are kept."""
        path = self.run(name) / "train/metrics.jsonl"
        return path.read_text().count('"loss"') if path.exists() else 0


@pytest.fixture(scope="module")
def site(cluster: Cluster, sif_of_recipe: Sif) -> Site:
    folder = cluster.checkout / "tiny"
    make_tiny_model(folder / "model", hidden_size=128)
    turns = [[("user", f"{i} + 1"), ("assistant", str(i + 1))] for i in range(60)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.py").write_text(TASK)
    (cluster.checkout / "recipes/tiny.yaml").write_text(RECIPE)
    image = cluster.checkout / "build/wherry.sif"
    image.parent.mkdir(exist_ok=True)
    image.symlink_to(sif_of_recipe.path)
    subprocess.run(["chown", "-R", "--no-dereference", f"{USER}:", cluster.checkout], check=True)
    path = f"{sif_of_recipe.host.root}/apptainer/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    cache = str(cluster.folder / "home/cache")  # of this test alone: a killed compiler leaves its lock behind
    settings = {"WHERRY_DEVICE": "cpu", "WHERRY_CACHE": cache, "OMP_NUM_THREADS": "1"}
    return Site(cluster, {"PATH": path, "HF_TOKEN": MARKER, **settings})


THREE_NODES = ("--nodes=3", "--gpus-per-node=1")


def test_a_node_s_power_cut_changes_nothing_in_the_adapter(site: Site, request: pytest.FixtureRequest) -> None:
    site.user("slurm/prepare.sh", "recipes/tiny.yaml", "--run", "whole")
    site.user("slurm/submit.sh", *THREE_NODES, "train", "recipes/tiny.yaml", "--run", "whole")
    whole = site.jobs("whole")["train"]
    assert whole.wait(timeout=600) == "COMPLETED", whole.log
    assert "3 ranks, sharding zero3" in whole.log

    site.user("slurm/pipeline.sh", *THREE_NODES, "recipes/tiny.yaml", "--run", "cut", "WHERRY_PREPARE=job")
    jobs = site.jobs("cut")
    assert list(jobs) == ["prepare", "train", "merge", "eval"]
    train = jobs["train"]
    train.until(lambda: site.step("cut") >= 4, 600, "step 4")
    site.cluster.power_off("n3")
    train.until(lambda: train.show()["Restarts"] == "1", 300, "requeue")
    reached = site.step("cut")
    assert 4 <= reached < STEPS
    site.cluster.power_on("n3")
    for mode in ("train", "merge", "eval"):
        assert jobs[mode].wait("COMPLETED", "FAILED", "CANCELLED", timeout=600) == "COMPLETED", jobs[mode].log

    second = (site.run("cut") / f"logs/train-{train.id}-2.log").read_text()
    assert "from checkpoint-" in second
    assert site.step("cut") == STEPS
    manifest = json.loads((site.run("cut") / "manifest.json").read_text())
    assert manifest["modes"]["train"]["provenance"]["slurm"]["SLURM_RESTART_COUNT"] == "1"
    assert str((site.cluster.checkout / "build/wherry.sif").resolve()) in json.dumps(manifest)
    apart = difference(site.run("whole"), site.run("cut"))
    say(request, f"adapters with and without the power cut: {apart:.1e} of the largest number apart")
    assert apart < 0.01
    (result,) = json.loads((site.run("cut") / "eval/merged/result.json").read_text())
    assert (result["n"], result["N"], result["errors"]) == (4, 4, 0)
    assert "cut" in site.user("slurm/here.sh", "status", "--run", "cut")


def difference(one: Path, other: Path) -> float:
    """The largest difference of two adapters' numbers, as a share of the largest number."""
    a, b = (load_file(run / "train/adapter/adapter_model.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    largest = max(tensor.abs().max().item() for tensor in a.values())
    return max((a[name] - b[name]).abs().max().item() for name in a) / largest


def test_a_mistake_is_three_lines_without_a_traceback(site: Site) -> None:
    """Through srun, apptainer and torchrun, on every rank."""
    site.user(
        "slurm/submit.sh", *THREE_NODES, "train", "recipes/tiny.yaml", "--run", "typo", "train.args.learnin_rate=1"
    )
    job = site.jobs("typo")["train"]
    assert job.wait(timeout=300) == "FAILED"
    assert job.exit_code == 2, job.log
    said = [line for line in job.log.splitlines() if line.startswith(("error:", "where:", "fix:"))]
    assert len(said) == 3, job.log
    assert "learning_rate" in said[2]
    assert "Traceback" not in job.log


def test_an_evaluation_ends_with_its_server(site: Site) -> None:
    """vLLM's engine is killed while the client asks: exit code 5 is that of the job."""
    many = TASK.replace("range(4)", "range(20000)")
    (site.cluster.checkout / "tiny/many.py").write_text(many)
    site.user("slurm/submit.sh", "eval", "--run", "whole", "eval.tasks=[tiny/many.py]", "eval.args.max_tokens=100")
    job = site.jobs("whole")["eval"]
    state = site.run("whole") / "serve/state.json"
    job.until(lambda: state.exists() and json.loads(state.read_text())["state"] == "ready", 600, "ready")
    job.until(lambda: any(site.run("whole").glob("eval/base/logs/*")), 120, "the client's log")
    (engine,) = processes("VLLM::EngineCore")
    engine_ended = subprocess.run(["kill", "-KILL", engine], check=False)
    assert engine_ended.returncode == 0
    assert job.wait(timeout=90) == "FAILED"
    assert job.exit_code == 5, job.log
    assert "error: vLLM" in job.log
    assert json.loads(state.read_text())["state"] == "failed"


def processes(name: str) -> list[str]:
    return subprocess.run(["pgrep", "-u", USER, "-f", name], capture_output=True, text=True, check=False).stdout.split()


def test_a_server_job_drains_and_ends(site: Site) -> None:
    site.user("slurm/submit.sh", "serve", "--run", "whole")
    job = site.jobs("whole")["serve"]
    job.wait_for_text("ready after", 600)
    site.user("scancel", "--batch", "--signal=USR1", job.id)
    assert job.wait(timeout=60) == "COMPLETED", job.log
    assert json.loads((site.run("whole") / "serve/state.json").read_text())["state"] == "stopped"


def test_no_log_holds_the_secret(site: Site) -> None:
    """All that the jobs above have written. Must be the last test of this file."""
    written = [*site.cluster.checkout.glob("*.out"), *(p for p in site.run(".").rglob("*") if p.is_file())]
    assert len(written) > 20
    holding = [path for path in written if MARKER.encode() in path.read_bytes()]
    assert not holding
