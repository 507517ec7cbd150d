"""Faults injected one at a time into a healthy job of three nodes with eight GPUs: the right check, the right fix.

What cannot exist here is a stand-in: NVML (nvml_stand_in.py), and files of /sys, /proc and /dev in a folder that stands
for /. Job scripts, model folders, run directories, recipes, environment and ports are real.
"""

import json
import os
import resource
import socket
from pathlib import Path

import pytest
from nvml_stand_in import Nvml
from tiny_model import make_tiny_model

from wherry import ranks
from wherry.doctor import device, jobscript, model, network, node, planned, script  # noqa: F401 they register
from wherry.doctor.check import CHECKS, Result, made
from wherry.doctor.context import Context
from wherry.plan import gpus
from wherry.rundir import Run

ROOT = Path(__file__).parents[2]
MEMINFO = "MemTotal: 2113000000 kB\nMemAvailable: 2000000000 kB\n"
SCRIPT = """#!/bin/bash
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun --cpus-per-task=64 --mpi=none apptainer exec --nv wherry.sif /opt/wherry-src/entrypoints/entrypoint.sh train r.yaml
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), shards=2)


class Job:
    """A healthy job, as its first rank sees it, and what a test changes of it."""

    def __init__(self, folder: Path, model_folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        for path in model_folder.iterdir():
            (self.model / path.name).write_bytes(path.read_bytes())
        self.rows = folder / "rows.jsonl"
        self.rows.write_text(
            '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n'
        )
        self.values = [f"model.name={self.model}", f"data.train={self.rows}"]
        self.recipe = folder / "r.yaml"
        self.recipe.write_text(
            "model: {name: x}\ndata: {train: x}\ntrain: {args: {max_length: 256}}\neval: {tasks: [a.py]}\n"
        )
        self.script = SCRIPT
        self.sbatch = ""
        self.gpus = "3x8xH100-80"
        self.nvml: Nvml | None = Nvml()
        self.root = folder / "root"
        self.rank = ranks.Rank(0, 0, 24, 8)
        self.env = {
            "HOME": str(folder),
            "WHERRY_CACHE": str(folder),
            "MASTER_ADDR": "192.0.2.1",
            "MASTER_PORT": "10123",
            "NCCL_SOCKET_IFNAME": "=ib0",
            "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        }
        for name in ("dev/shm", "dev/infiniband", "sys/class/net/ib0", "sys/class/net/lo", "var/log", "proc"):
            (self.root / name).mkdir(parents=True)
        for name in ("dev/nvidiactl", "dev/infiniband/uverbs0", "var/log/kern.log"):
            (self.root / name).touch()
        for i in range(8):
            self.write(f"sys/class/infiniband/mlx5_{i}/ports/1/state", "4: ACTIVE")
            self.write(f"sys/class/infiniband/mlx5_{i}/ports/1/rate", "400 Gb/sec (4X NDR)")
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/mounts", "tmpfs / tmpfs rw 0 0\nhome:/x /nfs nfs4 rw 0 0\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit_json(self, name: str, **values) -> None:
        path = self.model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def edit_script(self, old: str, new: str) -> None:
        assert old in self.script
        self.script = self.script.replace(old, new)

    def run(self) -> dict[str, Result]:
        path = self.folder / "train.sh"
        path.write_text(self.script)
        context = Context(self.rank, self.env, self.root, nvml=self.nvml, node="node1")
        context.script = jobscript.read(path, self.sbatch)
        context.gpus = gpus.parse(self.gpus)
        context.run = Run.open(str(self.recipe), None, self.values)
        return {result.id: result for result in made(CHECKS, context)}


@pytest.fixture
def job(tmp_path, runs, tiny, monkeypatch):
    """Limits and the environment of a healthy node; checks of ranks read the real environment."""
    made_job = Job(tmp_path, tiny)
    for name, value in made_job.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WHERRY_DEVICE", raising=False)
    monkeypatch.setenv("WHERRY_GPUS_PER_NODE", "8")
    monkeypatch.setattr(node, "limits", lambda: {"memlock": resource.RLIM_INFINITY, "nofile": 1 << 20})
    monkeypatch.setattr(node, "size_of", lambda path: 500 << 30)
    monkeypatch.setattr(node, "free_of", lambda folder: 500 << 30)
    monkeypatch.setattr(node, "write_speed", lambda folder: 1e9)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: name if name[0].isdigit() else "192.0.2.1")
    made_job.monkeypatch = monkeypatch
    return made_job


def troubles(results):
    return {name: result for name, result in results.items() if result.status in ("warn", "fail")}


def test_a_healthy_job_raises_nothing(job):
    results = job.run()
    assert troubles(results) == {}
    looked_at = [name for name, result in results.items() if result.status == "pass"]
    assert len(looked_at) > 45, {name: result.found for name, result in results.items() if result.status == "skip"}


@pytest.mark.parametrize("name", ["train", "serve", "merge", "eval", "doctor", "prepare"])
def test_the_job_scripts_of_this_project_raise_nothing(name):
    context = Context(ranks.Rank(0, 0, 1, 1), {}, script=jobscript.read(ROOT / f"slurm/{name}.sh"))
    found = [result for result in made(CHECKS, context) if result.id.startswith("script.")]
    assert [result for result in found if result.status == "fail"] == []


# ---- faults ----------------------------------------------------------------------------------------------------------
# id → (what is done to the healthy job, the check that must notice, its status, words of the fix)


def change(**values):
    return lambda job: [setattr(job, name, value) for name, value in values.items()]


def env(**values):
    def inject(job):
        job.env |= values
        for name, value in values.items():
            job.monkeypatch.setenv(name, value)

    return inject


def scripted(old, new):
    return lambda job: job.edit_script(old, new)


def gpu(name, value, index=3):
    def inject(job):
        getattr(job.nvml, name)[index] = value

    return inject


def file(name, text):
    return lambda job: job.write(name, text)


def recipe(*values):
    return lambda job: job.values.extend(values)


def no_infiniband_device(job):
    (job.root / "dev/infiniband/uverbs0").unlink()


def all_ports_down(job):
    for i in range(8):
        job.write(f"sys/class/infiniband/mlx5_{i}/ports/1/state", "1: DOWN")


def busy_port(job):
    holder = socket.socket()
    holder.bind(("", 0))
    holder.listen()
    job.holder = holder  # open until the test ends
    job.env["MASTER_PORT"] = str(holder.getsockname()[1])


def one_cpu(job):
    env(SLURM_JOB_ID="1", SLURM_NTASKS_PER_NODE="1")(job)
    job.monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    job.monkeypatch.setattr(os, "cpu_count", lambda: 128)


def limit(**values):
    def inject(job):
        job.monkeypatch.setattr(node, "limits", lambda: {"memlock": -1, "nofile": 1 << 20} | values)

    return inject


def missing_shard(job):
    next(job.model.glob("model-00001*.safetensors")).unlink()


def truncated_shard(job):
    path = next(job.model.glob("model-00001*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def pointer(job):
    path = next(job.model.glob("model-00001*.safetensors"))
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def added_token_outside(job):
    made = json.loads((job.model / "tokenizer.json").read_text())
    made["added_tokens"].append({"id": 512, "content": "<new>", "special": True})
    job.edit_json("tokenizer.json", **made)


def no_eos(job):
    job.edit_json("tokenizer_config.json", eos_token=None)


def no_template(job):
    (job.model / "chat_template.jinja").unlink(missing_ok=True)
    job.edit_json("tokenizer_config.json", chat_template=None)


def bad_contract(job):
    folder = Path(os.environ["WHERRY_RUNS"]) / "r"
    folder.mkdir(parents=True)
    contract = {"embedding_rows": 512, "tokenizer_len": 262, "largest_id": 261, "pad_token_id": 2, "eos_token_id": 2}
    contract |= {"eos_token_ids": [2], "context_length": 512, "max_length": 256}
    (folder / "manifest.json").write_text(json.dumps({"name": "r", "modes": {}, "contract": contract}))


def another_model_than_prepared(job):
    bad_contract(job)
    path = Path(os.environ["WHERRY_RUNS"]) / "r/manifest.json"
    made = json.loads(path.read_text())
    made["contract"] |= {"embedding_rows": 999, "pad_token_id": 0}
    path.write_text(json.dumps(made))
    (path.parent / "prepare").mkdir()
    (path.parent / "prepare/model").symlink_to(job.model)


def lost_link(job):
    folder = Path(os.environ["WHERRY_RUNS"]) / "r/prepare"
    folder.mkdir(parents=True)
    (folder / "model").symlink_to(job.folder / "gone")
    job.values[0] = "model.name=org/llama-3.1-8b"


def no_room(size):
    return lambda job: job.monkeypatch.setattr(planned, "free_bytes", lambda folder: size)


def big_model(*values):
    """The 70B model, of which nothing is here yet."""

    def inject(job):
        model_name = "model.name=deepseek-ai/DeepSeek-R1-Distill-Llama-70B"
        job.values = [model_name, job.values[1], "serve.vllm.tensor_parallel_size=8", *values]
        no_room(10**13)(job)  # is room enough

    return inject


def hours(limit, extra=""):
    def inject(job):
        big_model("train.sharding=zero3", "train.args.max_steps=100000")(job)
        job.edit_script("12:00:00", limit)
        if extra:
            job.edit_script(extra, "")

    return inject


FAULTS = {
    "a task sees one GPU": (
        scripted("--gpus-per-node=8", "--gpus-per-task=1"),
        "script.gpus-per-task",
        "fail",
        "--gpus-per-node=",
    ),
    "srun with gpus-per-task": (
        scripted("srun ", "srun --gpus-per-task=1 "),
        "script.gpus-per-task",
        "fail",
        "--gpus-per-node=8",
    ),
    "gpu-bind": (change(sbatch="--gpu-bind=single:1"), "script.gpu-bind", "fail", "--gpu-bind=none"),
    "no GPUs": (scripted("#SBATCH --gpus-per-node=8\n", ""), "script.gpus", "fail", "--gpus-per-node=8"),
    "four tasks for eight GPUs": (
        scripted("--ntasks-per-node=1", "--ntasks-per-node=4"),
        "script.tasks",
        "fail",
        "--ntasks-per-node=8",
    ),
    "srun gets one CPU": (scripted("srun --cpus-per-task=64", "srun"), "script.cpus", "fail", "SRUN_CPUS_PER_TASK=64"),
    "one CPU a GPU": (scripted("cpus-per-task=64", "cpus-per-task=8"), "script.cpus", "warn", "--cpus-per-task=32"),
    "no signal": (scripted("#SBATCH --signal=B:USR1@120\n", ""), "script.signal", "warn", "--signal=B:USR1"),
    "signal to the tasks": (scripted("B:USR1", "USR1"), "script.signal", "warn", "--signal=B:USR1@120"),
    "no requeue": (scripted("#SBATCH --requeue\n", ""), "script.requeue", "warn", "#SBATCH --requeue"),
    "no time": (scripted("#SBATCH --time=12:00:00\n", ""), "script.time", "warn", "--time"),
    "too little time": (hours("0-01:00:00"), "script.time", "fail", "WHERRY_MAX_RESTARTS"),
    "too little memory": (scripted("--mem=0", "--mem=16G"), "script.memory", "fail", "--mem=0"),
    "no memory": (scripted("#SBATCH --mem=0\n", ""), "script.memory", "warn", "--mem=0"),
    "directive too late": (
        change(script=SCRIPT + "#SBATCH --exclusive\n"),
        "script.directives",
        "fail",
        "move all #SBATCH",
    ),
    "variable in a directive": (
        scripted("--nodes=3", "--nodes=$NODES"),
        "script.directives",
        "fail",
        "write the value",
    ),
    "rank of the batch shell": (
        scripted("train r.yaml", "--node-rank $SLURM_PROCID"),
        "script.expansion",
        "fail",
        "bash -c '",
    ),
    "no srun": (
        scripted("srun --cpus-per-task=64 --mpi=none", "torchrun"),
        "script.launcher",
        "fail",
        "srun --ntasks-per-node=1",
    ),
    "devices overridden": (
        scripted("export MASTER", "export CUDA_VISIBLE_DEVICES=0\nexport MASTER"),
        "script.visible",
        "fail",
        "take the line out",
    ),
    "no --nv": (scripted(" --nv", ""), "script.nv", "fail", "apptainer exec --nv"),
    "fixed port": (scripted("$((10000 + SLURM_JOB_ID % 20000))", "29500"), "script.port", "warn", "SLURM_JOB_ID"),
    "clients do not wait": (
        scripted("train r.yaml", "serve --run r &\nsleep 90\npython ask.py"),
        "script.wait",
        "fail",
        "wherry wait",
    ),
    # device: NVML is a stand-in
    "a rank sees one of eight": (
        env(CUDA_VISIBLE_DEVICES="0"),
        "device.visible",
        "fail",
        "leave CUDA_VISIBLE_DEVICES unset",
    ),
    "gpus-per-task in the job": (
        env(CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_PER_TASK="1"),
        "device.visible",
        "fail",
        "replace --gpus-per-task=1",
    ),
    "old driver": (lambda job: setattr(job.nvml, "driver", "515.65.01"), "device.driver", "fail", "newer driver"),
    "no driver in the container": (change(nvml=None), "device.driver", "fail", "--nv"),
    "mixed GPUs": (gpu("name", "NVIDIA A100-SXM4-80GB"), "device.same", "warn", "one kind"),
    "ECC errors": (gpu("ecc", 2), "device.ecc", "fail", "--exclude=node1"),
    "row remapping failed": (gpu("rows", (0, 8, 0, 1)), "device.ecc", "fail", "--exclude=node1"),
    "a row waits": (gpu("rows", (0, 1, 1, 0)), "device.ecc", "warn", "reset"),
    "Xid 79": (
        file("var/log/kern.log", "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus"),
        "device.xid",
        "fail",
        "--exclude=node1",
    ),
    "Xid 31": (file("var/log/kern.log", "NVRM: Xid (PCI:0000:1b:00): 31, pid=1"), "device.xid", "warn", "program"),
    "memory held": (gpu("used", 30 << 30), "device.memory", "fail", "--exclusive"),
    "throttled": (gpu("clocks", 0x40), "device.clocks", "warn", "--exclude"),
    "an NVLink is down": (gpu("links", [1] * 5 + [0] + [1] * 12), "device.nvlink", "fail", "--exclude"),
    "no peer access": (lambda job: job.nvml.p2p.update({(0, 3): 3}), "device.peer", "warn", "IOMMU"),
    "MIG": (gpu("mig", (1, 1)), "device.mode", "fail", "whole GPUs"),
    "prohibited": (gpu("mode", 2), "device.mode", "fail", "whole GPUs"),
    # network: /sys is a folder of the test
    "master is loopback": (env(MASTER_ADDR="127.0.1.1"), "network.address", "fail", "first node's name"),
    "no master": (env(MASTER_ADDR=""), "network.address", "fail", "slurm/train.sh"),
    "port in use": (busy_port, "network.port", "fail", "MASTER_PORT"),
    "port that is none": (env(MASTER_PORT="many"), "network.port", "fail", "slurm/train.sh"),
    "ephemeral port": (env(MASTER_PORT="45678"), "network.port", "warn", "below 32768"),
    "no such interface": (env(NCCL_SOCKET_IFNAME="eth7"), "network.interface", "fail", "site profile"),
    "loopback": (env(NCCL_SOCKET_IFNAME="lo"), "network.interface", "fail", "network's interface"),
    "prefix of two interfaces": (
        lambda job: (job.write("sys/class/net/ib1/x", ""), env(NCCL_SOCKET_IFNAME="ib")(job)),
        "network.interface",
        "warn",
        "==ib0",
    ),
    "no uverbs": (no_infiniband_device, "network.infiniband", "fail", "--device=/dev/infiniband"),
    "all ports down": (all_ports_down, "network.infiniband", "fail", "--exclude"),
    "a rail is missing": (
        file("sys/class/infiniband/mlx5_3/ports/1/state", "1: DOWN"),
        "network.infiniband",
        "warn",
        "rail",
    ),
    # node
    "small /dev/shm": (
        lambda job: job.monkeypatch.setattr(node, "size_of", lambda path: 64 << 20),
        "node.shm",
        "fail",
        "--ipc=host",
    ),
    "one CPU for the step": (one_cpu, "node.cpus", "fail", "srun --cpus-per-task"),
    "slow scratch": (
        lambda job: job.monkeypatch.setattr(node, "write_speed", lambda folder: 2e7),
        "node.scratch",
        "warn",
        "faster local folder",
    ),
    "full scratch": (
        lambda job: job.monkeypatch.setattr(node, "free_of", lambda folder: 1 << 30),
        "node.scratch",
        "fail",
        "larger local folder",
    ),
    "memlock": (limit(memlock=64 << 10), "node.memlock", "fail", "ulimit -l unlimited"),
    "open files": (limit(nofile=1024), "node.nofile", "warn", "ulimit -n"),
    "cache on NFS": (env(TRITON_CACHE_DIR="/nfs/me/.triton"), "node.cache", "fail", "WHERRY_CACHE"),
    "no home": (env(HOME="/nowhere"), "node.home", "fail", "entrypoint.sh"),
    "PYTHONPATH": (env(PYTHONPATH="/site/packages"), "node.python", "warn", "unset PYTHONPATH"),
    "container without --nv": (
        env(APPTAINER_CONTAINER="x.sif"),
        "node.gpu-in-container",
        "fail",
        "apptainer exec --nv",
    ),
    "little memory": (
        lambda job: (job.write("proc/meminfo", MEMINFO.replace("2000000000", "8000000")), env(SLURM_JOB_ID="1")(job)),
        "node.memory",
        "fail",
        "--mem=0",
    ),
    "group with little memory": (
        lambda job: (job.write("sys/fs/cgroup/memory.max", str(8 << 30)), env(SLURM_JOB_ID="1")(job)),
        "plan.host",
        "fail",
        "--mem=0",
    ),
    # model and data
    "a shard is missing": (missing_shard, "model.shards", "fail", "run it again"),
    "a shard is cut": (truncated_shard, "model.shards", "fail", "download it again"),
    "LFS pointer": (pointer, "model.shards", "fail", "git lfs pull"),
    "the folder is gone": (lost_link, "model.shards", "fail", "put it back"),
    "wrong vocab_size": (
        lambda job: job.edit_json("config.json", vocab_size=500),
        "model.config",
        "fail",
        "set vocab_size to 512",
    ),
    "id outside the embedding": (added_token_outside, "model.vocabulary", "fail", "never resize the embedding down"),
    "no eos": (no_eos, "model.pad", "fail", "eos_token"),
    "pad is a stop token": (bad_contract, "model.pad", "fail", "pad token of its own"),
    "another model": (another_model_than_prepared, "model.contract", "fail", "prepare again"),
    "no template": (no_template, "model.template", "fail", "data.chat_template"),
    "template file": (recipe("data.chat_template=none.jinja"), "model.template", "fail", "correct data.chat_template"),
    "rows too long for the model": (recipe("train.args.max_length=4096"), "train.context", "fail", "max_length=512"),
    "server beyond the model": (recipe("serve.vllm.max_model_len=4096"), "serve.context", "fail", "max_model_len=512"),
    "answers fill the context": (recipe("eval.args.max_tokens=512"), "eval.context", "fail", "max_model_len"),
    "answers fill most of it": (recipe("eval.args.max_tokens=400"), "eval.context", "warn", "counts as wrong"),
    "a bad row": (lambda job: job.rows.write_text("{not json\n"), "data.rows", "fail", "correct or remove that line"),
    "rows of no kind": (lambda job: job.rows.write_text('{"text": "x"}\n'), "data.rows", "fail", "preference rows"),
    "no rows": (lambda job: job.rows.write_text(""), "data.rows", "fail", "correct data.train"),
    "no data": (lambda job: job.rows.unlink(), "data.rows", "fail", "correct data.train"),
    "not prepared in a job": (env(SLURM_JOB_ID="1"), "recipe.staged", "fail", "on the login node: wherry prepare"),
    # plan, merge, serve
    "70B whole on every GPU": (big_model(), "plan.fits", "fail", "train.sharding=zero3"),
    "no room for checkpoints": (no_room(1000), "plan.disk", "fail", "save_total_limit"),
    "no room to merge": (
        lambda job: (big_model("train.sharding=zero3")(job), no_room(100_000_000_000)(job)),
        "merge.space",
        "fail",
        "WHERRY_RUNS",
    ),
    "no memory to merge": (
        file("proc/meminfo", "MemTotal: 900000 kB\nMemAvailable: 800000 kB\n"),
        "merge.memory",
        "fail",
        "slurm/merge.sh",
    ),
    "heads not divided": (recipe("serve.vllm.tensor_parallel_size=3"), "serve.parallel", "fail", "one of: 1, 2, 4"),
    "more than a node's GPUs": (
        big_model("train.sharding=zero3", "serve.vllm.tensor_parallel_size=16"),
        "serve.parallel",
        "fail",
        "tensor_parallel_size=8",
    ),
    "cache too small": (
        big_model("train.sharding=zero3", "serve.vllm.tensor_parallel_size=1"),
        "serve.cache",
        "fail",
        "tensor_parallel_size=",
    ),
}
# Checks that rightly notice the fault as well.
ALSO = {
    "a task sees one GPU": {"script.tasks"},
    "no room for checkpoints": {"merge.space"},
    "little memory": {"recipe.staged"},
    "one CPU for the step": {"recipe.staged"},
    "group with little memory": {"recipe.staged", "node.memory"},
}


def test_there_are_more_than_forty_faults():
    assert len(FAULTS) > 80


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_by_its_check_with_its_fix(job, name):
    inject, check, status, words = FAULTS[name]
    inject(job)
    results = job.run()
    result = results[check]
    assert (result.status, result.id) == (status, check), result
    assert words in result.fix
    assert result.found
    others = set(troubles(results)) - {check} - ALSO.get(name, set())
    assert not others, {other: results[other].found for other in others}
