"""Checks of a job script, before it is submitted."""

from __future__ import annotations

import re
from collections.abc import Callable

from wherry.doctor.check import Verdict, check, fail, passed, skip, warn
from wherry.doctor.context import Context
from wherry.doctor.jobscript import JobScript

NONE = "no job script is given (wherry doctor slurm/train.sh)"
CPUS_PER_GPU = 4  # a rank, its data loader, NCCL's and CUDA's own threads
CLIENT = re.compile(r"https?://|\b(curl|wget|python3?|inspect|lm[_-]eval|eval)\b")
RESTARTS = 4  # slurm/train.sh: WHERRY_MAX_RESTARTS


Look = Callable[[JobScript, Context], Verdict]


def look(name: str) -> Callable[[Look], Look]:
    """Register a check of a job script; it is skipped where none is given."""

    def register(function: Look) -> Look:
        def one(context: Context) -> Verdict:
            return function(context.script, context) if context.script else skip(NONE)

        check(f"script.{name}", "once")(one)
        return function

    return register


def _given(script: JobScript, option: str) -> str | None:
    """The value of an option in a directive or at an srun, or None."""
    if option in script.options:
        return script.options[option]
    for line in script.steps:
        if found := re.search(rf"--{option}[= ](\S+)", line):
            return found[1]
    return None


@look("directives")
def directives(script: JobScript, _: Context) -> Verdict:
    if script.late:
        return fail(
            f"#SBATCH {script.late[0]} stands below the first command: Slurm does not read it",
            "move all #SBATCH lines to the top, directly below #!/bin/bash",
        )
    variable = [f"--{name}={value}" for name, value in script.options.items() if "$" in value]
    if variable:
        return fail(
            f"#SBATCH {variable[0]}: Slurm puts no variables in",
            "write the value itself, or give it to sbatch on the command line",
        )
    return passed(f"{len(script.options)} options, all above the first command")


@look("gpus-per-task")
def gpus_per_task(script: JobScript, _: Context) -> Verdict:
    value = _given(script, "gpus-per-task")
    if value is None:
        return passed("not used")
    return fail(
        f"--gpus-per-task={value}: a task sees {value} GPU while local ranks run to 7 (invalid device ordinal)",
        f"replace it by --gpus-per-node={script.gpus_per_node or 8}: every task must see all GPUs of its node",
    )


@look("gpu-bind")
def gpu_bind(script: JobScript, _: Context) -> Verdict:
    value = _given(script, "gpu-bind")
    if value is None or value in ("none", "closest"):
        return passed(value or "not used")
    return fail(
        f"--gpu-bind={value} hides the GPUs of the other tasks: no CUDA IPC between them, wrong ordinals",
        "leave it out, or use --gpu-bind=none",
    )


@look("gpus")
def gpus(script: JobScript, context: Context) -> Verdict:
    if script.gpus_per_node:
        return passed(f"{script.nodes} × {script.gpus_per_node} GPUs")
    if script.trains and not context.on_cpu:
        return fail("no GPUs are asked for", "add #SBATCH --gpus-per-node=8")
    return passed("none are asked for")


@look("tasks")
def tasks(script: JobScript, _: Context) -> Verdict:
    each, count = script.tasks_per_node, script.gpus_per_node
    if each > 1 and count and each != count:
        return fail(
            f"{each} tasks and {count} GPUs a node",
            f"--ntasks-per-node=1 (a worker for each GPU is started in it), or --ntasks-per-node={count}",
        )
    return passed(f"{each} task{'s' * (each != 1)} a node, {count} GPUs")


@look("cpus")
def cpus(script: JobScript, _: Context) -> Verdict:
    asked = script.number("cpus-per-task")
    literal = [
        line for line in script.steps if "[@]}" not in line and "--cpus-per-task" not in line and " -c" not in line
    ]
    sets = any("SRUN_CPUS_PER_TASK" in line for line in script.commands)
    if asked > 1 and literal and not sets:
        return fail(
            f"srun does not take over --cpus-per-task={asked} (Slurm 22.05 and later): its tasks get 1 CPU",
            f"srun --cpus-per-task={asked} …, or export SRUN_CPUS_PER_TASK={asked}",
        )
    if "exclusive" in script.options or not script.gpus_per_node:
        return passed("the whole node" if "exclusive" in script.options else "no GPUs to feed")
    each = max(1, asked) * script.tasks_per_node / script.gpus_per_node
    if each < CPUS_PER_GPU:
        return warn(
            f"{each:.1f} CPUs for a GPU: loading and data will wait",
            f"--cpus-per-task={CPUS_PER_GPU * script.gpus_per_node // script.tasks_per_node} or more, or --exclusive",
        )
    return passed(f"{each:.0f} CPUs for a GPU")


@look("memory")
def memory(script: JobScript, context: Context) -> Verdict:
    value = script.options.get("mem")
    if value is None:
        if any(name in script.options for name in ("mem-per-gpu", "mem-per-cpu")):
            return passed("asked for by GPU or CPU")
        return warn("--mem is not given: some sites give a few GB a CPU then", "--mem=0 takes all of the node's memory")
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", value, re.IGNORECASE)
    size = int(found[1]) * 1024 ** ("KMGT".index(found[2].upper() or "M") - 2) if found else 0.0  # GiB
    if not size:
        return passed("all of the node's" if found else value)
    if context.plan and script.trains and size * 2**30 < context.plan.host.size:
        needed = context.plan.host.size / 2**30
        return fail(f"--mem={value}, and the first node needs {needed:.0f} GiB", f"--mem={needed:.0f}G, or --mem=0")
    return passed(f"{size:.0f} GiB a node")


@look("signal")
def signal(script: JobScript, _: Context) -> Verdict:
    if not script.trains:
        return passed("no training")
    value = script.options.get("signal", "")
    if not value:
        return warn(
            "no --signal: at the time limit the training is killed, not saved",
            "#SBATCH --signal=B:USR1@120, and answer it as slurm/train.sh does",
        )
    if not value.startswith("B:"):
        return warn(
            f"--signal={value} goes to srun's tasks, and USR1 ends torchrun's workers",
            f"#SBATCH --signal=B:{value}: to the batch shell alone, which asks the ranks to save",
        )
    return passed(f"--signal={value}")


@look("requeue")
def requeue(script: JobScript, _: Context) -> Verdict:
    if not script.trains:
        return passed("no training")
    if "no-requeue" in script.options or "requeue" not in script.options:
        return warn("no --requeue: a node that fails ends the training for good", "#SBATCH --requeue")
    return passed("--requeue")


@look("time")
def time(script: JobScript, context: Context) -> Verdict:
    limit = script.hours
    if limit is None:
        return warn("--time is not given: the partition's default may be an hour, or its maximum", "#SBATCH --time=…")
    needed = context.plan.hours if context.plan and script.trains else None
    if needed is None:
        return skip(f"the limit is {limit:g} h; how long the work takes is not known before prepare")
    starts = -(-needed // limit)
    if starts <= 1:
        return passed(f"about {needed:.2g} h of {limit:g} h")
    again = "requeue" in script.options and "signal" in script.options
    if again and starts - 1 <= RESTARTS:
        return passed(f"about {needed:.2g} h: {starts:.0f} times {limit:g} h, requeued in between")
    return fail(
        f"about {needed:.2g} h are planned, the limit is {limit:g} h" + (f", {RESTARTS} restarts" if again else ""),
        f"--time={-(-needed // 1):.0f}:00:00, more nodes, or --signal and --requeue, WHERRY_MAX_RESTARTS={starts:.0f}",
    )


@look("expansion")
def expansion(script: JobScript, _: Context) -> Verdict:
    for line in script.steps:
        after = line.partition("srun")[2]
        quoted = re.sub(r"'[^']*'", "", after)
        if found := re.search(r"(?<!\\)\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b", quoted):
            return fail(
                f"${found[1]} in an srun line is put in by the batch shell, where it is 0: every task becomes rank 0",
                f"quote the command with ' ' (srun bash -c '… ${found[1]} …'), or let the task read it itself",
            )
    return passed("ranks are read in the tasks")


@look("launcher")
def launcher(script: JobScript, _: Context) -> Verdict:
    lines = [line for line in script.commands if re.search(r"\b(torchrun|accelerate launch|deepspeed)\b", line)]
    if script.nodes > 1 and any("srun" not in line for line in lines):
        return fail(
            f"{script.nodes} nodes, and the launcher runs on the first alone: no srun before it",
            "srun --ntasks-per-node=1 … torchrun …, or use slurm/train.sh",
        )
    return passed("started by srun" if lines else "none of its own")


@look("visible")
def visible(script: JobScript, _: Context) -> Verdict:
    for line in script.commands:
        if found := re.search(r"\b((?:APPTAINERENV_|SINGULARITYENV_)?CUDA_VISIBLE_DEVICES)=([^\s;]+)", line):
            return fail(f"{found[0]} overrides what Slurm gave the job", f"take the line out: {found[1]} is Slurm's")
    return passed("CUDA_VISIBLE_DEVICES is left to Slurm")


@look("nv")
def nv(script: JobScript, context: Context) -> Verdict:
    for line in script.commands if script.gpus_per_node else ():
        inside = re.search(r"\b(apptainer|singularity) (exec|run)\b", line)
        if inside and not re.search(r"--nv(ccli)?\b|\[@\]\}", line):  # an array may hold --nv
            return fail("apptainer without --nv: nothing in the container can use a GPU", "apptainer exec --nv …")
    return passed("--nv where there are GPUs")


@look("port")
def port(script: JobScript, _: Context) -> Verdict:
    for line in script.commands:
        if found := re.search(r"(?:MASTER_PORT=|--master[-_]port[= ])(\d+)\b", line):
            return warn(
                f"port {found[1]} is fixed: two jobs on a node take it from each other (address already in use)",
                "derive it from SLURM_JOB_ID, below 32768, as slurm/train.sh does",
            )
    return passed("not fixed")


@look("wait")
def wait(script: JobScript, _: Context) -> Verdict:
    serves = [i for i, line in enumerate(script.commands) if re.search(r"\bserve\b.*&\s*$", line)]
    if not serves:
        return passed("no server in the background")
    rest = script.commands[serves[0] + 1 :]
    if any(re.search(r"(wherry|entrypoint\.sh)\S* +wait\b", line) for line in rest):
        return passed("wherry wait before the clients")
    if not any(CLIENT.search(line) for line in rest):
        return passed("no client in this script")
    return fail(
        "requests are sent to a server that is started in the background, and nothing waits until it can answer",
        "put `wherry wait --run NAME` before the clients, or use slurm/eval.sh",
    )
