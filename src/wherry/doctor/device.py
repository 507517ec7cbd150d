"""Checks of a node's GPUs, asked through NVML, which sees them without CUDA and takes no memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from wherry import ranks
from wherry.doctor.check import Verdict, check, fail, passed, skip, warn
from wherry.doctor.context import Context
from wherry.errors import WherryError

NO_GPU = "no NVIDIA driver here"
MINIMUM_DRIVER = (525, 60, 13)  # CUDA 12's minor version compatibility, as entrypoints/environment.sh has it
USED_LIMIT = 1 << 30  # bytes that others may hold: display, monitoring
# nvmlClocksEventReason: hardware slowdown, software and hardware thermal, power brake.
THROTTLED = {0x8: "hardware slowdown", 0x20: "too warm (software)", 0x40: "too warm (hardware)", 0x80: "power brake"}
# Xid numbers after which a GPU is not to be trusted; the others are mostly the program's own faults (13, 31, 43, 45).
FATAL_XID = {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120}
RESET = "drain the node and have the GPU reset; until then leave it out: sbatch --exclude={node}"


@check("device.visible", "rank")
def visible(context: Context) -> Verdict:
    if context.on_cpu:
        return skip("WHERRY_DEVICE=cpu")
    try:
        ranks.check_visible(context.rank)
    except WherryError as error:
        return fail(f"{error.what}; {error.where}", error.fix)
    seen = ranks.visible_gpus()
    if not seen:
        return skip("no GPU is visible")
    return passed(f"{seen} visible, local ranks {context.rank.local_world_size}")


@check("device.driver", "node")
def driver(context: Context) -> Verdict:
    if context.nvml is None:
        if context.path("/dev/nvidiactl").exists():
            return fail(
                "the GPU's device nodes are here and its driver cannot be asked (libnvidia-ml)",
                "start the container with --nv (docker: --gpus all)",
            )
        if (job := int(context.env.get("WHERRY_GPUS_PER_NODE") or 0)) and not context.on_cpu:
            return fail(
                f"the job has {job} GPUs on this node, and nothing here can use one",
                "see that nvidia-smi works on the node, and that apptainer was given --nv",
            )
        return skip(NO_GPU)
    version = str(context.ask("nvmlSystemGetDriverVersion") or "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version))
    if numbers < MINIMUM_DRIVER:
        needed = ".".join(map(str, MINIMUM_DRIVER))
        return fail(f"driver {version}: the image's CUDA 12.8 needs {needed}", "ask for a newer driver, or other nodes")
    return passed(f"driver {version}")


@check("device.same", "node")
def same(context: Context) -> Verdict:
    kinds = {
        (str(context.ask("nvmlDeviceGetName", d)), context.nvml.nvmlDeviceGetMemoryInfo(d).total >> 30)
        for d in context.devices()
    }
    if not kinds:
        return skip(NO_GPU)
    named = ", ".join(sorted(f"{name} {memory} GiB" for name, memory in kinds))
    if len(kinds) > 1:
        return warn(
            f"different GPUs: {named}", "the smallest decides: ask for one kind (--constraint, --gres=gpu:TYPE:N)"
        )
    return passed(f"{len(context.devices())} × {named}")


@check("device.ecc", "node")
def ecc(context: Context) -> Verdict:
    bad, pending, known = [], [], False
    for i, device in enumerate(context.devices()):
        errors = context.ask("nvmlDeviceGetTotalEccErrors", device, 1, 0)  # uncorrected, since the driver was loaded
        rows = context.ask("nvmlDeviceGetRemappedRows", device)
        known |= errors is not None or rows is not None
        if errors:
            bad.append(f"GPU {i}: {errors} uncorrected ECC errors")
        if rows and rows[3]:
            bad.append(f"GPU {i}: row remapping failed")
        elif rows and rows[2]:
            pending.append(f"GPU {i}: a row waits to be remapped")
    if bad:
        return fail("; ".join(bad), RESET.format(node=context.node))
    if pending:
        return warn("; ".join(pending), RESET.format(node=context.node))
    return passed("no uncorrected errors") if known else skip("no ECC here" if context.devices() else NO_GPU)


@check("device.xid", "node")
def xid(context: Context) -> Verdict:
    if context.nvml is None:
        return skip(NO_GPU)
    log = _kernel_log(context)
    if log is None:
        return skip("the kernel log is not readable (it mostly needs root)")
    found = sorted({int(number) for number in re.findall(r"NVRM: Xid \([^)]*\): (\d+)", log)})
    if fatal := [number for number in found if number in FATAL_XID]:
        return fail(f"Xid {', '.join(map(str, fatal))} in the kernel log", RESET.format(node=context.node))
    if found:
        return warn(
            f"Xid {', '.join(map(str, found))} in the kernel log",
            "mostly a program's own fault; look if it comes again",
        )
    return passed("no Xid in the kernel log")


def _kernel_log(context: Context) -> str | None:
    """What the kernel has said since it started, or None where it may not be read."""
    if context.path("/var/log/kern.log").is_file():
        return context.text("/var/log/kern.log")
    try:
        descriptor = os.open(context.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    with os.fdopen(descriptor, "rb", buffering=0) as file, suppress(OSError):
        while record := os.read(file.fileno(), 8192):
            lines.append(record.decode(errors="replace"))
    return "".join(lines)


@check("device.memory", "node")
def memory(context: Context) -> Verdict:
    mine, held = os.getpid(), []
    for i, device in enumerate(context.devices()):
        used = context.nvml.nvmlDeviceGetMemoryInfo(device).used
        others = [p.pid for p in context.ask("nvmlDeviceGetComputeRunningProcesses", device) or [] if p.pid != mine]
        if used > USED_LIMIT:
            by = f" (process {', '.join(map(str, others))})" if others else ""
            held.append(f"GPU {i}: {used / 2**30:.1f} GiB{by}")
    if held:
        return fail(
            f"memory is held by others: {'; '.join(held)}", "end them (nvidia-smi shows who), or ask for --exclusive"
        )
    return passed("free") if context.devices() else skip(NO_GPU)


@check("device.clocks", "node")
def clocks(context: Context) -> Verdict:
    slow = []
    for i, device in enumerate(context.devices()):
        reasons = context.ask("nvmlDeviceGetCurrentClocksEventReasons", device)
        if reasons is None:
            reasons = context.ask("nvmlDeviceGetCurrentClocksThrottleReasons", device) or 0
        slow += [f"GPU {i}: {name}" for bit, name in THROTTLED.items() if reasons & bit]
    if slow:
        return warn(
            f"throttled: {'; '.join(slow)}", "all ranks wait for the slowest: tell the site, or --exclude the node"
        )
    return passed("not throttled") if context.devices() else skip(NO_GPU)


@check("device.nvlink", "node")
def nvlink(context: Context) -> Verdict:
    down, up = [], 0
    for i, device in enumerate(context.devices()):
        states = [context.ask("nvmlDeviceGetNvLinkState", device, link) for link in range(18)]
        up += states.count(1)
        if 1 in states and 0 in states[: len(states) - states[::-1].index(1)]:
            down.append(f"GPU {i}: link {states.index(0)} is down")
        elif states.count(0) and not states.count(1):
            down.append(f"GPU {i}: all links are down")
    if down:
        return fail("; ".join(down), "NVLink is broken: tell the site, or --exclude the node")
    if up:
        return passed(f"{up} links up")
    return skip("no NVLink here" if context.devices() else NO_GPU)


@check("device.peer", "node")
def peer(context: Context) -> Verdict:
    devices = context.devices()
    if len(devices) < 2:
        return skip("one GPU" if devices else NO_GPU)
    without = [
        f"{i}-{j}"
        for i, one in enumerate(devices)
        for j, other in enumerate(devices)
        if i < j and context.ask("nvmlDeviceGetP2PStatus", one, other, 0) not in (0, None)
    ]
    if without:
        return warn(
            f"GPUs {', '.join(without[:4])} cannot read each other: NCCL goes through host memory",
            "see that no MIG, virtualisation (ACS, IOMMU) or --gpu-bind is between them",
        )
    return passed("every GPU reads every other")


@check("device.mode", "node")
def mode(context: Context) -> Verdict:
    bad = []
    for i, device in enumerate(context.devices()):
        mig = context.ask("nvmlDeviceGetMigMode", device)
        if mig and mig[0]:
            bad.append(f"GPU {i} is divided (MIG)")
        if context.ask("nvmlDeviceGetComputeMode", device) == 2:
            bad.append(f"GPU {i} allows no programs (compute mode prohibited)")
    if bad:
        return fail("; ".join(bad), "ask the site for whole GPUs: --gres=gpu:TYPE:N names them")
    return passed("whole GPUs") if context.devices() else skip(NO_GPU)
