"""Checks of the network between ranks. Those of a single machine look at files; the others are one collective."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from wherry.doctor.check import Result, Verdict, check, fail, passed, skip, warn
from wherry.doctor.context import Context
from wherry.plan.gpus import Gpus

ALONE = "one rank: nothing is sent"
MEET_SECONDS = 60
BYTES = 256 << 20  # of a GPU's all-reduce: what follows is latency no more
BYTES_CPU = 8 << 20
SKEW_SECONDS = 5  # above that, logs of nodes cannot be compared, and time-limited credentials fail


@check("network.address", "node")
def address(context: Context) -> Verdict:
    if context.rank.alone:
        return skip(ALONE)
    name = context.env.get("MASTER_ADDR", "")
    if not name:
        return fail("MASTER_ADDR is not set", "start through slurm/train.sh, or torchrun --master-addr")
    try:
        found = socket.gethostbyname(name)
    except OSError:
        return fail(
            f"MASTER_ADDR={name} has no address here", "use the node's name as `scontrol show hostnames` has it"
        )
    several = context.rank.world_size > context.rank.local_world_size
    if several and found.startswith("127."):
        return fail(
            f"MASTER_ADDR={name} is {found} here: every node would wait for itself",
            "give the first node's name, or its address on the network (MASTER_ADDR=…)",
        )
    return passed(f"{name} is {found}")


@check("network.port", "once")
def port(context: Context) -> Verdict:
    if context.rank.alone:
        return skip(ALONE)
    text = context.env.get("MASTER_PORT", "")
    if not text.isdigit() or not 0 < int(text) < 65536:
        return fail(f"MASTER_PORT={text or '(unset)'}", "start through slurm/train.sh, which derives one from the job")
    number = int(text)
    first, last = (int(n) for n in (context.text("/proc/sys/net/ipv4/ip_local_port_range") or "32768 60999").split())
    # Torchrun gives its workers a port of its own store, which is in use and meant to be.
    if "TORCHELASTIC_RUN_ID" not in context.env and _taken(number):
        return fail(f"port {number} is in use on {context.node}", "end what uses it, or set MASTER_PORT")
    if "TORCHELASTIC_RUN_ID" not in context.env and first <= number <= last:
        return warn(
            f"port {number} lies in {first}-{last}, from which the kernel gives ports to anyone",
            f"take one below {first}, as slurm/train.sh does",
        )
    return passed(str(number))


def _taken(number: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError:
            return True
    return False


@check("network.interface", "node")
def interface(context: Context) -> Verdict:
    given = context.env.get("NCCL_SOCKET_IFNAME")
    if context.rank.alone or not given:
        return skip(ALONE if context.rank.alone else "NCCL_SOCKET_IFNAME is not set")
    there = sorted(path.name for path in context.path("/sys/class/net").glob("*"))
    exact = given.startswith("=")
    patterns = given.lstrip("=^").split(",")
    found = [name for name in there for p in patterns if (name == p if exact else fnmatch.fnmatch(name, f"{p}*"))]
    if given.startswith("^"):
        found = [name for name in there if name not in found]
    if not found:
        return fail(
            f"NCCL_SOCKET_IFNAME={given}: no such interface on {context.node} ({', '.join(there)})",
            "leave it out (the route to MASTER_ADDR is taken), or correct it in the site profile",
        )
    if found == ["lo"] and context.rank.world_size > context.rank.local_world_size:
        return fail(
            f"NCCL_SOCKET_IFNAME={given} is loopback, and there are several nodes", "name the network's interface"
        )
    if len(found) > 1:
        return warn(
            f"NCCL_SOCKET_IFNAME={given} fits {', '.join(found)}: NCCL takes all that begin like it",
            f"NCCL_SOCKET_IFNAME=={found[0]} is exactly that one",
        )
    return passed(found[0])


@check("network.infiniband", "node")
def infiniband(context: Context) -> Verdict:
    ports = infiniband_ports(context)
    if not ports:
        return skip("no InfiniBand here")
    active = [name for name, (state, _) in ports.items() if "ACTIVE" in state]
    down = sorted(set(ports) - set(active))
    if not active:
        return fail(f"no port is active: {', '.join(down)}", "tell the site, or --exclude the node")
    if not any(context.path("/dev/infiniband").glob("uverbs*")):
        return fail(
            "InfiniBand is there, and /dev/infiniband/uverbs* is not: NCCL would use sockets in silence",
            "docker run --device=/dev/infiniband; apptainer shows the host's",
        )
    if down:
        return warn(f"ports down: {', '.join(down)}; active: {', '.join(active)}", "tell the site: a rail is missing")
    return passed(f"{len(active)} active ports, {sum(rate for _, rate in ports.values()):.0f} Gbit/s together")


def infiniband_ports(context: Context) -> dict[str, tuple[str, float]]:
    """device/port → (state, Gbit/s)."""
    found = {}
    for port in sorted(context.path("/sys/class/infiniband").glob("*/ports/*")):
        name = f"{port.parent.parent.name}/{port.name}"
        state = (port / "state").read_text().strip() if (port / "state").is_file() else ""
        rate = re.match(r"[\d.]+", (port / "rate").read_text()) if (port / "rate").is_file() else None
        found[name] = (state, float(rate[0]) if rate else 0.0)
    return found


# ---- all ranks together ----------------------------------------------------------------------------------------------


@dataclass
class Met:
    """What the ranks told each other. error: why they did not meet."""

    error: str = ""
    bandwidth: float = 0.0
    on_gpu: bool = False
    facts: list[dict[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)


def meet(context: Context, mine: list[Result], log: Path) -> Met:
    """Join all ranks, measure an all-reduce, and exchange results. log: where NCCL writes what it uses."""
    import torch
    import torch.distributed as dist

    on_gpu = not context.on_cpu and torch.cuda.is_available()
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH", "NCCL_DEBUG_FILE": f"{log}.%h.%p"}
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=MEET_SECONDS))
        dist.barrier()  # no rank takes GPU memory while another still looks who holds some
        if on_gpu:
            torch.cuda.set_device(context.rank.local_rank)
        bandwidth = _bandwidth(torch, dist, on_gpu)
        dist.barrier()
        fact = {"node": context.node, "rank": context.rank.rank, "time": time.time(), "transport": transport(log)}
        fact |= {"image": image_here(context), "revision": context.env.get("WHERRY_REVISION")}
        everyone: list[Any] = [None] * context.rank.world_size
        dist.all_gather_object(everyone, (fact, mine))
        dist.destroy_process_group()
    except Exception as error:  # of many kinds, all of them what this check is for
        return Met(error=" ".join(str(error).split())[:300], on_gpu=on_gpu, results=mine)
    facts = [one[0] for one in everyone]
    return Met("", bandwidth, on_gpu, facts, [result for one in everyone for result in one[1]])


def _bandwidth(torch: Any, dist: Any, on_gpu: bool) -> float:
    """Bus bandwidth of an all-reduce, GB/s: what each link carries (nccl-tests, doc/PERFORMANCE.md)."""
    group = dist.new_group(backend="nccl") if on_gpu else None
    count = (BYTES if on_gpu else BYTES_CPU) // 4
    tensor = torch.ones(count, device="cuda" if on_gpu else "cpu")
    times = []
    for _ in range(4):
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    ranks = dist.get_world_size()
    return 2 * (ranks - 1) / ranks * count * 4 / min(times[1:]) / 1e9


def transport(log: Path) -> dict[str, int]:
    """Which ways NCCL's log says that it uses, and how many channels use each."""
    counts: dict[str, int] = {}
    for path in log.parent.glob(f"{log.name}.*"):
        for line in path.read_text(errors="replace").splitlines():
            if found := re.search(r"via (NET/IB|NET/Socket|NET/AWS|NET/OFI|NET/\w+|P2P|SHM|NVLS)", line):
                counts[found[1]] = counts.get(found[1], 0) + 1
            elif found := re.search(r"(?:NET/(IB|Socket)|Using network (\w+))", line):
                name = f"using {found[1] or found[2]}"
                counts[name] = counts.get(name, 0) + 1
    return counts


WORDS = {
    "NET/IB": "InfiniBand",
    "NET/Socket": "TCP sockets",
    "P2P": "GPU to GPU (NVLink or PCIe)",
    "SHM": "host memory",
}


def group_results(context: Context, met: Met, gpus: Gpus) -> list[Result]:
    """The verdicts on what all ranks did together; the first rank speaks, and where they did not meet, each."""
    if not context.rank.is_main and not met.error:
        return []
    verdicts = {
        "network.allreduce": allreduce(context, met, gpus),
        "network.transport": used_transport(context, met),
        "network.clocks": clocks(met),
        "network.image": image(met),
    }
    return [Result(name, *verdict, context.node) for name, verdict in verdicts.items()]


def allreduce(context: Context, met: Met, gpus: Gpus) -> Verdict:
    if context.rank.alone:
        return skip(ALONE)
    if met.error:
        return fail(
            f"the {context.rank.world_size} ranks did not meet within {MEET_SECONDS} s: {met.error}",
            "see network.address, network.interface and network.port; a firewall between nodes looks like this as well",
        )
    found = f"{met.bandwidth:.3g} GB/s over {context.rank.world_size} ranks"
    if not met.on_gpu:
        return passed(f"{found} (gloo, on the CPU)")
    expected, of = expected_bandwidth(context, gpus)
    if met.bandwidth < 0.2 * expected:
        return fail(f"{found}, {of} should give {expected:.0f}", "see network.transport and device.nvlink")
    if met.bandwidth < 0.5 * expected:
        return warn(f"{found}, {of} should give {expected:.0f}", "see network.transport, device.peer and device.nvlink")
    return passed(f"{found}, {of} gives {expected:.0f} at best")


def expected_bandwidth(context: Context, gpus: Gpus) -> tuple[float, str]:
    """(GB/s, of what): NVLink within a node; between nodes all active InfiniBand ports of one."""
    if context.rank.world_size == context.rank.local_world_size:
        return gpus.link, f"{gpus.name}'s link"
    rate = sum(rate for state, rate in infiniband_ports(context).values() if "ACTIVE" in state) / 8
    return (min(rate, gpus.link), "InfiniBand") if rate else (1.0, "Ethernet")


def used_transport(context: Context, met: Met) -> Verdict:
    if context.rank.alone:
        return skip(ALONE)
    if met.error or not met.on_gpu:
        return skip("no NCCL here" if not met.error else "the ranks did not meet")
    used = {name for fact in met.facts for name in fact["transport"] if name in WORDS}
    words = ", ".join(WORDS[name] for name in sorted(used)) or "NCCL's log does not say"
    active = any("ACTIVE" in state for state, _ in infiniband_ports(context).values())
    if "NET/Socket" in used and active:
        return fail(
            "NCCL talks over TCP sockets between nodes, and InfiniBand is there",
            "see network.infiniband; NCCL_IB_DISABLE or NCCL_IB_HCA (environment, site profile) may be in the way",
        )
    if "SHM" in used and "P2P" not in used:
        return warn("GPUs of a node talk through host memory", "see device.peer; NCCL_P2P_DISABLE may be set")
    return passed(words)


def clocks(met: Met) -> Verdict:
    if len(met.facts) < 2:
        return skip("nothing to compare")
    first = min(met.facts, key=lambda fact: fact["time"])
    last = max(met.facts, key=lambda fact: fact["time"])
    skew = last["time"] - first["time"]
    if skew > SKEW_SECONDS:
        return warn(
            f"clocks differ by {skew:.0f} s ({first['node']}, {last['node']})",
            "tell the site (NTP): munge and time-limited credentials fail, logs do not fit together",
        )
    return passed(f"within {skew:.2g} s")


def image_here(context: Context) -> str | None:
    """What tells this node's image from another build: its labels, which hold the time it was built.

    WHERRY_IMAGE comes from the batch shell and is the same on every node, whatever each one runs.
    """
    if labels := context.text("/.singularity.d/labels.json"):
        return "labels " + hashlib.sha256(labels.encode()).hexdigest()[:12]
    return context.env.get("WHERRY_IMAGE")


def image(met: Met) -> Verdict:
    if len({fact["node"] for fact in met.facts}) < 2:
        return skip("one node")
    found: dict[tuple[str, str], set[str]] = {}
    for fact in met.facts:
        found.setdefault((fact["image"] or "no image", fact["revision"] or ""), set()).add(fact["node"])
    if len(found) > 1:
        named = "; ".join(f"{image} on {', '.join(sorted(nodes))}" for (image, _), nodes in found.items())
        return fail(f"nodes run different images: {named}", "put one SIF on the shared file system (WHERRY_SIF)")
    return passed(f"the same on all nodes: {next(iter(found))[0]}")
