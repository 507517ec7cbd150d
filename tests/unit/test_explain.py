"""wherry explain: logs and ids; its page is docs/troubleshooting.md."""

import re
from pathlib import Path

import pytest

from wherry import explain
from wherry.errors import Exit
from wherry.explain.entries import MESSAGES, all_messages

ROOT = Path(__file__).parents[2]

# A line as each tool prints it → the entry that must be found.
LINES = {
    "RuntimeError: CUDA error: invalid device ordinal": "invalid device ordinal",
    "Indexing.cu:1255: indexSelectLargeIndex: Assertion `srcIndex < srcSelectDimSize` failed.": "device-side assert",
    "RuntimeError: CUDA error: device-side assert triggered": "device-side assert",
    "IndexError: index out of range in self": "index out of range in self",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.": "CUDA out of memory",
    "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.": "Xid",
    "CUDA error: uncorrectable ECC error encountered": "uncorrectable ECC error",
    "CUDA error: an illegal memory access was encountered": "illegal memory access",
    "The NVIDIA driver on your system is too old (found version 11040).": "driver too old",
    "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8": "driver too old",
    "RuntimeError: No CUDA GPUs are available": "no CUDA-capable device",
    "[rank3]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)": "NCCL watchdog timeout",
    "NCCL WARN Call to ibv_create_qp failed": "NCCL: network plugin or InfiniBand",
    "NCCL WARN Bootstrap : no socket interface found": "NCCL: no socket interface",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1": "NCCL error",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms": "rendezvous failed",
    "RuntimeError: The server socket has failed to listen: EADDRINUSE": "address already in use",
    "error: ZeRO-3 did not split the model: at load this rank holds 131 GiB": "ZeRO-3 did not split the model",
    "size mismatch for base_model.model.model.embed_tokens.weight": "size mismatch",
    "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge": "damaged weights",
    "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files": "hub not reached",
    "huggingface_hub.errors.GatedRepoError: 401 Client Error.": "gated model",
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.": "shared memory too small",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.": "killed by the out-of-memory killer",
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***": "time limit reached",
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01 DUE TO PREEMPTION ***": "preempted or cancelled",
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED DUE TO NODE FAILURE ***": "node failure",
    "OSError: [Errno 116] Stale file handle: '/home/me/.triton'": "stale file handle",
    "OSError: [Errno 28] No space left on device": "no space left",
    "PermissionError: [Errno 13] Permission denied: '/.cache'": "permission denied or read-only",
    "OSError: [Errno 24] Too many open files": "too many open files",
    "PMIX ERROR: ERROR in file gds_ds12_lock_pthread.c": "PMI or MPI in the container",
    "{'loss': 'nan', 'grad_norm': 'nan', 'learning_rate': '1e-4'}": "loss is not finite",
    "{'loss': nan, 'learning_rate': 1e-4}": "loss is not finite",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:": "torchrun: ChildFailedError",
    "ImportError: cannot import name 'x' from 'transformers' (/home/me/.local/x.py)": "wrong package imported",
    "requests.exceptions.ConnectionError: [Errno 111] Connection refused": "server is not up",
    "ValueError: 63 attention heads (64) must be divisible by tensor parallel size (3)": "vLLM: attention heads",
}


@pytest.mark.parametrize("line", LINES)
def test_a_message_of_a_tool_is_known(line):
    found = explain.search(["nothing here", f"  {line}"])
    assert len(found) == 1
    assert found[0].entry.name.startswith(LINES[line])
    assert found[0].line == 2


def test_a_log_that_went_well_has_no_message():
    log = (
        "{'loss': '1.234', 'grad_norm': '0.5', 'learning_rate': '1e-4'}",
        "[Gloo] Rank 0 is connected to 1 peer ranks.",
        "INFO: Application startup complete.",
        "train: lora on the GPU, 24 ranks, sharding zero3",
        "{'loss': '0.7', 'info': 'x'}",
    )
    assert explain.search(log) == []


def test_the_first_message_comes_first_and_repeats_are_counted(wherry, tmp_path):
    log = tmp_path / "job.out"
    log.write_text("ok\nCUDA error: invalid device ordinal\nCUDA error: invalid device ordinal\nChildFailedError:\n")
    code, out, _ = wherry("explain", log)
    assert code == 0
    assert out.startswith("line 2, 2 times: CUDA error: invalid device ordinal\n")
    assert out.index("--gpus-per-node=N") < out.index("ChildFailedError")


def test_ids_and_mistakes(wherry, tmp_path):
    code, out, _ = wherry("explain", "device.visible")
    assert code == 0
    assert "--gpus-per-node=N" in out
    code, _, err = wherry("explain", "device.visble")
    assert code == Exit.USAGE
    assert "did you mean device.visible?" in err
    assert wherry("explain")[0] == Exit.USAGE
    (tmp_path / "quiet.log").write_text("all is well\n")
    code, out, err = wherry("explain", tmp_path / "quiet.log")
    assert (code, out) == (0, "")
    assert "no message that is known here" in err


def test_the_page_is_the_table():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert page == explain.page(), "write it anew: wherry explain --page >docs/troubleshooting.md"


def test_names_are_one_each_and_checks_that_entries_name_exist():
    names = [entry.name for entry in all_messages()]
    assert len(names) == len(set(names))
    ids = {entry.name for entry in explain.CHECKS}
    for entry in MESSAGES:
        for named in re.findall(
            r"\b(?:script|device|network|node|model|plan)\.[a-z-]+[a-z]\b", entry.means + entry.fix
        ):
            assert named in ids, named
