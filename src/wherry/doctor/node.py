"""Checks of a machine: memory, limits, file systems, and whose software is found first."""

from __future__ import annotations

import os
import resource
import shutil
import site
import sys
import tempfile
import time
from pathlib import Path

from wherry.doctor.check import Verdict, check, fail, passed, skip, warn
from wherry.doctor.context import TRIAL_BYTES, Context

GIB = 2**30
SHM_PER_RANK = 1 * GIB  # NCCL's segments and the data loaders' batches
OPEN_FILES = 4096
SCRATCH = 5 * GIB
SCRATCH_SPEED = 50e6  # bytes/s, below which compiling and caching take longer than training's first steps
NETWORK_FILES = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "wekafs", "fuse.sshfs", "panfs"}
CACHES = ("WHERRY_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")


@check("node.shm", "node")
def shm(context: Context) -> Verdict:
    path = context.path("/dev/shm")
    if not path.is_dir():
        return fail("/dev/shm is not there", "docker run --ipc=host, apptainer exec without --contain")
    found = size_of(path)
    needed = SHM_PER_RANK * context.rank.local_world_size
    if found < needed:
        return fail(
            f"/dev/shm has {found / GIB:.2g} GiB, {context.rank.local_world_size} ranks need {needed / GIB:.0f}",
            "docker run --ipc=host or --shm-size=16g; apptainer shares the host's",
        )
    return passed(f"{found / GIB:.0f} GiB")


def size_of(path: Path) -> int:
    """Bytes of a file system."""
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize


def limits() -> dict[str, int]:
    """Soft limits of this process, -1 for none."""
    return {
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


@check("node.memlock", "node")
def memlock(context: Context) -> Verdict:
    limit = limits()["memlock"]
    if limit == resource.RLIM_INFINITY:
        return passed("unlimited")
    if any(context.path("/sys/class/infiniband").glob("*")):
        return fail(
            f"locked memory is limited to {limit / 2**20:.0f} MiB: InfiniBand registers more than that",
            "ulimit -l unlimited; in slurmd's service LimitMEMLOCK=infinity (the site's task)",
        )
    return passed(f"{limit / 2**20:.0f} MiB, and no InfiniBand to need more")


@check("node.nofile", "node")
def nofile(context: Context) -> Verdict:
    limit = limits()["nofile"]
    if 0 <= limit < OPEN_FILES:
        return warn(f"{limit} open files", f"ulimit -n {OPEN_FILES} in the job script")
    return passed(f"{limit} open files")


@check("node.cpus", "node")
def cpus(context: Context) -> Verdict:
    found = len(os.sched_getaffinity(0))
    local = context.rank.local_world_size
    # With several tasks a node each has its own share; with torchrun all workers share the task's.
    shared = 1 if context.env.get("SLURM_NTASKS_PER_NODE", "1") == str(local) else local
    if context.in_job and found < 2 * shared and (os.cpu_count() or 1) > found:
        return fail(
            f"this step may use {found} of the node's {os.cpu_count()} CPUs, for {shared} ranks",
            "srun --cpus-per-task=N: since Slurm 22.05 a step does not take it over from the job",
        )
    return passed(f"{found} CPUs")


@check("node.memory", "node")
def memory(context: Context) -> Verdict:
    total, free = memory_of(context)
    if context.plan is None or context.on_cpu:
        return passed(f"{total / GIB:.0f} GiB")
    if not context.in_job:
        return skip(f"this machine has {total / GIB:.0f} GiB; the job's nodes are asked in the job (plan.host)")
    needed = context.plan.host.size
    if free < needed:
        return fail(
            f"{free / GIB:.0f} of {total / GIB:.0f} GiB are free, the first node needs {needed / GIB:.0f}",
            f"--mem=0, or --mem={needed / GIB:.0f}G; wherry plan --explain host says what for",
        )
    return passed(f"{free / GIB:.0f} of {total / GIB:.0f} GiB free, {needed / GIB:.0f} needed")


def memory_of(context: Context) -> tuple[int, int]:
    """(total, available) bytes; a control group's limit counts where it is lower."""
    values = dict(
        (line.split(":")[0], int(line.split()[1]) * 1024)
        for line in context.text("/proc/meminfo").splitlines()
        if len(line.split()) > 1
    )
    total, free = values.get("MemTotal", 0), values.get("MemAvailable", 0)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = context.text(name)
        if limit.isdigit() and int(limit) < total:
            total, free = int(limit), min(free, int(limit))
    return total, free


@check("node.scratch", "node")
def scratch(context: Context) -> Verdict:
    folder = Path(context.env.get("WHERRY_CACHE") or context.env.get("TMPDIR") or tempfile.gettempdir())
    while not folder.is_dir():
        folder = folder.parent
    free = free_of(folder)
    if not os.access(folder, os.W_OK):
        return fail(f"{folder} cannot be written", "set WHERRY_CACHE or TMPDIR to a local folder of yours")
    if free < SCRATCH:
        return fail(
            f"{free / GIB:.1f} GiB are free in {folder}, compiling needs {SCRATCH / GIB:.0f}",
            "free some space, or let WHERRY_CACHE name a larger local folder",
        )
    speed = write_speed(folder)
    if speed < SCRATCH_SPEED:
        return warn(f"{folder} is written at {speed / 1e6:.0f} MB/s", "let WHERRY_CACHE name a faster local folder")
    return passed(f"{free / GIB:.0f} GiB free in {folder}, {speed / 1e6:.0f} MB/s")


def free_of(folder: Path) -> int:
    """Bytes."""
    return shutil.disk_usage(folder).free


def write_speed(folder: Path) -> float:
    """Bytes/s, down to the disk."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(TRIAL_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return TRIAL_BYTES / (time.perf_counter() - started)


@check("node.cache", "node")
def cache(context: Context) -> Verdict:
    remote = []
    for name in CACHES:
        folder = context.env.get(name)
        if folder and (kind := file_system(context, folder)) in NETWORK_FILES:
            remote.append(f"{name}={folder} ({kind})")
    if remote:
        return fail(
            f"compile caches on a network file system: {'; '.join(remote)}",
            "let WHERRY_CACHE name a local folder: stale handles and races between nodes end jobs otherwise",
        )
    return passed("local")


def file_system(context: Context, folder: str) -> str:
    """The type of the file system that holds a folder, from /proc/mounts."""
    best, kind = "", ""
    for line in context.text("/proc/mounts").splitlines():
        point, of = line.split()[1:3]
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, of
    return kind


@check("node.python", "node")
def python(context: Context) -> Verdict:
    user = site.getusersitepackages()
    if site.ENABLE_USER_SITE and user in sys.path:
        return fail(
            f"packages of {user} come before the image's",
            "start through entrypoints/entrypoint.sh, or export PYTHONNOUSERSITE=1",
        )
    if path := context.env.get("PYTHONPATH"):
        return warn(f"PYTHONPATH={path} comes before the image's packages", "unset PYTHONPATH (a module may set it)")
    return passed(f"packages of {sys.prefix} alone")


@check("node.home", "node")
def home(context: Context) -> Verdict:
    folder = Path(context.env.get("HOME", ""))
    if not context.env.get("HOME") or not os.access(folder, os.W_OK):
        return fail(
            f"HOME={folder} cannot be written: libraries keep settings and caches there",
            "start through entrypoints/entrypoint.sh, which gives a HOME in WHERRY_CACHE",
        )
    return passed(str(folder))


@check("node.gpu-in-container", "node")
def container(context: Context) -> Verdict:
    if "APPTAINER_CONTAINER" not in context.env:
        return skip("not in apptainer")
    if context.path("/dev/nvidiactl").exists() and not any(context.path("/.singularity.d/libs").glob("libcuda.so*")):
        return fail("the node has a GPU and the container was started without --nv", "apptainer exec --nv …")
    return passed("--nv" if context.path("/dev/nvidiactl").exists() else "the node has no GPU")
