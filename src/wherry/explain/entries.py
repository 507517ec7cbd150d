"""The one table behind docs/troubleshooting.md, `wherry explain` and the ids of `wherry doctor`.

`wherry explain --page >docs/troubleshooting.md` writes the page anew; a test compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from wherry.serve.diagnose import KNOWN


@dataclass(frozen=True)
class Entry:
    """name: a check's id, or a message as people search for it. pattern: of the message in a log; "" for a check."""

    name: str
    means: str
    fix: str
    pattern: str = ""


# What each check of doctor looks at, and what to do where it does not pass. The check itself names the values found.
CHECKS: tuple[Entry, ...] = (
    Entry("recipe.read", "The recipe can be read and its keys are known.", "Correct the line that the message names."),
    Entry(
        "recipe.staged",
        "Compute nodes often have no network, so everything must have been fetched by prepare.",
        "Run `wherry prepare` on the login node, with the same recipe and run.",
    ),
    # -- job script
    Entry(
        "script.directives",
        "Slurm stops reading #SBATCH lines at the first command, and puts no shell variables into them.",
        "Move all #SBATCH lines to the top and write values, not variables.",
    ),
    Entry(
        "script.gpus-per-task",
        "`--gpus-per-task=1` gives every task one visible GPU, number 0, while local ranks run to 7.",
        "Ask with `--gpus-per-node=N` and leave `--gpus-per-task` out.",
    ),
    Entry(
        "script.gpu-bind",
        "`--gpu-bind=single:1` and the like hide the other GPUs of a node from a task; CUDA IPC between them fails.",
        "Leave it out, or `--gpu-bind=none`.",
    ),
    Entry("script.gpus", "A training script asks for GPUs.", "`#SBATCH --gpus-per-node=8`."),
    Entry(
        "script.tasks",
        "A node runs one task, in which a worker for each GPU is started, or a task for each GPU; nothing between.",
        "`--ntasks-per-node=1`, or as many tasks as GPUs.",
    ),
    Entry(
        "script.cpus",
        "Since Slurm 22.05 srun does not take over `--cpus-per-task` from the job: its tasks would get one CPU.",
        "Give `--cpus-per-task` to srun as well, or export SRUN_CPUS_PER_TASK; four or more CPUs for a GPU.",
    ),
    Entry("script.memory", "The job asks for the host memory that the plan needs.", "`--mem=0` takes all of a node's."),
    Entry(
        "script.signal",
        "At its time limit a job is killed, unless it asked for a signal to save before.",
        "`#SBATCH --signal=B:USR1@120`, to the batch shell alone.",
    ),
    Entry("script.requeue", "A job without `--requeue` ends for good when a node fails.", "`#SBATCH --requeue`."),
    Entry(
        "script.time",
        "The planned hours fit the time limit, with the restarts that are allowed.",
        "More time or nodes, or `--signal` and `--requeue` with a larger WHERRY_MAX_RESTARTS.",
    ),
    Entry(
        "script.expansion",
        "`$SLURM_PROCID` outside single quotes is put in by the batch shell, where it is 0: every task is rank 0.",
        "Use single quotes, or let the task read its own environment.",
    ),
    Entry(
        "script.launcher",
        "torchrun or accelerate without srun starts on the job's first node alone.",
        "`srun --ntasks-per-node=1 … torchrun …`, or slurm/train.sh.",
    ),
    Entry(
        "script.visible",
        "A script that sets CUDA_VISIBLE_DEVICES overrides what Slurm gave the job.",
        "Take the line out.",
    ),
    Entry("script.nv", "In apptainer GPUs are there only with `--nv`.", "`apptainer exec --nv …`."),
    Entry(
        "script.port",
        "Two jobs on a node that have the same fixed port take it from each other.",
        "Derive it from SLURM_JOB_ID, below the range of ephemeral ports, as slurm/train.sh does.",
    ),
    Entry(
        "script.wait",
        "A 70B server takes up to half an hour until it can answer; clients that start before fail or wait for ever.",
        "`wherry wait --run NAME` before the clients, or slurm/eval.sh, which starts them when a token came back.",
    ),
    # -- plan
    Entry(
        "plan.fits",
        "The fullest moment of a training step fits a GPU (docs/plan.md).",
        "One of the changes that it lists; `wherry plan --explain PART` shows the numbers.",
    ),
    Entry(
        "plan.host",
        "The first node has the memory for its ranks and for what ZeRO-3 gathers at a checkpoint.",
        "Nodes with more memory, `--mem=0`, or train.sharding=none where the model fits a GPU.",
    ),
    Entry("plan.disk", "Checkpoints fit the run directory's file system.", "Free space, or lower save_total_limit."),
    # -- device
    Entry(
        "device.visible",
        "Every rank sees the GPU that it is to use. One that does not would end with `invalid device ordinal`.",
        "Ask with `--gpus-per-node=N`, without `--gpus-per-task` and `--gpu-bind`.",
    ),
    Entry(
        "device.driver",
        "The driver is here and new enough for the image's CUDA (525.60.13).",
        "Nodes with a newer driver; in a container `--nv` (docker: `--gpus all`).",
    ),
    Entry("device.same", "All GPUs are of one kind: the smallest and slowest decides.", "Ask for one kind."),
    Entry(
        "device.ecc",
        "Uncorrected memory errors or a failed row remapping: results are not to be trusted, jobs die.",
        "Have the GPU reset or changed; until then `sbatch --exclude=NODE`.",
    ),
    Entry(
        "device.xid",
        "The driver reported an Xid; 48, 63, 64, 74, 79, 92, 94, 95, 119 and 120 mean the GPU itself.",
        "Have the node drained; until then `sbatch --exclude=NODE`.",
    ),
    Entry("device.memory", "No other process holds the GPU's memory.", "End it, or ask for `--exclusive`."),
    Entry(
        "device.clocks", "The GPU is not throttled by heat or power; all ranks wait for the slowest.", "Tell the site."
    ),
    Entry("device.nvlink", "All NVLinks that there are, are up.", "Tell the site; `sbatch --exclude=NODE`."),
    Entry(
        "device.peer",
        "GPUs of a node read each other's memory directly.",
        "Look for MIG, virtualisation (ACS, IOMMU) or `--gpu-bind` between them.",
    ),
    Entry("device.mode", "GPUs are whole (no MIG) and allow programs.", "Ask for whole GPUs: `--gres=gpu:TYPE:N`."),
    # -- network
    Entry("network.address", "MASTER_ADDR is another node's address, not loopback.", "Give the first node's name."),
    Entry(
        "network.port",
        "MASTER_PORT is free, and below the range from which the kernel gives ports to anyone.",
        "Take one below that range; slurm/train.sh derives it from the job.",
    ),
    Entry(
        "network.interface",
        "NCCL_SOCKET_IFNAME names an interface of this node. It is a prefix; `=name` is exactly that one.",
        "Leave it out, or correct it in the site profile.",
    ),
    Entry(
        "network.infiniband",
        "InfiniBand ports are active and can be used in the container; NCCL would use sockets in silence.",
        "`docker run --device=/dev/infiniband`; a port that is down is the site's.",
    ),
    Entry(
        "network.allreduce",
        "All ranks meet, and an all-reduce is as fast as the link allows.",
        "See network.transport, network.infiniband, device.nvlink and device.peer.",
    ),
    Entry(
        "network.transport",
        "NCCL uses InfiniBand between nodes and NVLink or PCIe within one.",
        "Look for NCCL_IB_DISABLE, NCCL_IB_HCA or NCCL_P2P_DISABLE in the environment and the site profile.",
    ),
    Entry("network.clocks", "Clocks of the nodes agree within 5 s.", "Tell the site (NTP)."),
    Entry("network.image", "All nodes run the same image.", "One SIF on the shared file system (WHERRY_SIF)."),
    # -- node
    Entry(
        "node.shm",
        "/dev/shm has a GiB for each rank. Docker's default is 64 MiB: bus errors.",
        "`docker run --ipc=host` or `--shm-size=16g`.",
    ),
    Entry(
        "node.memlock",
        "Locked memory is unlimited, as InfiniBand needs it.",
        "`ulimit -l unlimited` (the site's task).",
    ),
    Entry("node.nofile", "A server holds a descriptor for every request.", "`ulimit -n 4096`."),
    Entry("node.cpus", "The step has more than one CPU.", "`srun --cpus-per-task=N`."),
    Entry("node.memory", "The node has the free memory that the plan needs.", "`--mem=0`."),
    Entry("node.scratch", "The local folder for caches has room and is fast.", "Let WHERRY_CACHE name another."),
    Entry(
        "node.cache",
        "Compile caches are local: on NFS they give stale handles and races between nodes.",
        "Let WHERRY_CACHE name a local folder.",
    ),
    Entry("node.python", "No package of ~/.local or PYTHONPATH comes before the image's.", "PYTHONNOUSERSITE=1."),
    Entry(
        "node.home", "HOME can be written: libraries keep settings there.", "Start through entrypoints/entrypoint.sh."
    ),
    Entry(
        "node.gpu-in-container", "A container on a node with GPUs was started with `--nv`.", "`apptainer exec --nv …`."
    ),
    # -- model, data, merge, serve, eval
    Entry(
        "model.shards",
        "Every file of the model is there, whole, and its header sound.",
        "Download what is named again; a link must lead somewhere.",
    ),
    Entry("model.config", "config.json's vocab_size is the embedding's.", "Correct it in config.json."),
    Entry(
        "model.vocabulary",
        "The tokenizer's largest id, added tokens included, lies inside the embedding (else: a device-side assert).",
        "Use the model's tokenizer; never resize the embedding down: `tokenizer.vocab_size` leaves added tokens out.",
    ),
    Entry(
        "model.pad",
        "Pad is no stop token: it would be masked out of the labels, and the model would never stop.",
        "prepare takes a reserved token; otherwise give the tokenizer a pad token of its own.",
    ),
    Entry(
        "model.contract",
        "Model, tokenizer and template are those that prepare saw.",
        "Remove the run's prepare folder and prepare again.",
    ),
    Entry("model.template", "There is a chat template for chat rows.", "Name one with data.chat_template."),
    Entry("train.context", "train.args.max_length is within the model's positions.", "Lower it."),
    Entry("serve.context", "serve.vllm.max_model_len is within the model's positions.", "Lower it."),
    Entry(
        "eval.context",
        "Prompt and answer fit the server's context; what does not fit counts as wrong, aloud.",
        "Raise serve.vllm.max_model_len, or lower eval.args.max_tokens.",
    ),
    Entry("data.rows", "The data can be read, and its rows are of a known kind.", "Correct the row that is named."),
    Entry("merge.space", "The merged model fits the file system.", "Free space, or another WHERRY_RUNS."),
    Entry(
        "merge.memory",
        "merge takes a tensor at a time, on the CPU: a few GiB, never the model's size.",
        "A node with a little more memory; it needs no GPU.",
    ),
    Entry(
        "serve.parallel",
        "serve.vllm.tensor_parallel_size divides the attention heads and the node has so many GPUs.",
        "One of the numbers that it lists.",
    ),
    Entry(
        "serve.cache",
        "The KV cache holds the longest request.",
        "More GPUs (tensor_parallel_size) or a shorter serve.vllm.max_model_len.",
    ),
)

# Messages of the tools below, the more telling first: where two entries fit a line, the first is taken.
MESSAGES: tuple[Entry, ...] = (
    Entry(
        "invalid device ordinal",
        "A rank asks for a GPU that it cannot see: its task has one, its local rank is larger (script.gpus-per-task).",
        "Ask with `--gpus-per-node=N`, without `--gpus-per-task` and `--gpu-bind`; doctor in the job shows each rank.",
        r"invalid device ordinal",
    ),
    Entry(
        "device-side assert triggered",
        "An index is out of range on the GPU: nearly always a token id outside the embedding (model.vocabulary).",
        "Compare `len(tokenizer)` and the largest id with the embedding's rows; do not resize it down. The line is "
        "where it was noticed, not where it happened: CUDA_LAUNCH_BLOCKING=1 shows that.",
        r"device-side assert|indexSelectLargeIndex|Assertion .srcIndex < srcSelectDimSize",
    ),
    Entry(
        "index out of range in self",
        "The same on a CPU: a token id outside the embedding (model.vocabulary).",
        "Use the tokenizer that belongs to the model.",
        r"index out of range in self",
    ),
    Entry(
        "CUDA out of memory",
        "The GPU's memory is used up. `wherry plan` says by what.",
        "Lower per_device_train_batch_size or max_length, gradient_checkpointing=true, use_liger_kernel=true, "
        "train.sharding=zero3 or train.tuning=qlora.",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    Entry(
        "Xid",
        "The driver found the GPU itself faulty, or a program's error on it (device.xid).",
        "Below 48 and 45 mostly the program; else drain the node, `sbatch --exclude=NODE`.",
        r"NVRM: Xid|fallen off the bus",
    ),
    Entry(
        "uncorrectable ECC error",
        "The GPU's memory is faulty (device.ecc).",
        "Have the GPU reset or changed; until then `sbatch --exclude=NODE`.",
        r"[Uu]ncorrectable (?:NVLink|ECC) error|ECC error encountered",
    ),
    Entry(
        "illegal memory access",
        "A kernel read where it may not: a faulty kernel, index or GPU.",
        "CUDA_LAUNCH_BLOCKING=1 names the kernel; look at device.ecc and device.xid.",
        r"illegal memory access|unspecified launch failure",
    ),
    Entry(
        "no kernel image is available",
        "The image was not built for this GPU's generation.",
        "Another GPU, or an image built for it (docs/images.md).",
        r"no kernel image is available",
    ),
    Entry(
        "driver too old",
        "The image's CUDA is newer than the node's driver (device.driver).",
        "Nodes with a newer driver.",
        r"driver (?:on your system is too old|version is insufficient)|unsatisfied condition: cuda|CUDA error 80[34]"
        r"|forward compatibility was attempted",
    ),
    Entry(
        "no CUDA-capable device",
        "Nothing in the container can use the GPU: started without `--nv`, or no GPU was given to the job.",
        "`apptainer exec --nv`, `docker run --gpus all`, `--gpus-per-node=N`.",
        r"no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver|libcuda\.so\.1: cannot open",
    ),
    Entry(
        "NCCL watchdog timeout",
        "A rank waited for the others until its time was up: one died, hangs, or does other work (rank 0 alone).",
        "Look for another rank's first error; prepare data before; TORCH_FR_BUFFER_SIZE=2000 records who waits.",
        r"Watchdog caught collective operation timeout|collective operation timeout|ProcessGroupNCCL.*[Tt]imed? ?out",
    ),
    Entry(
        "NCCL: network plugin or InfiniBand",
        "NCCL could not use InfiniBand (network.infiniband).",
        "See that /dev/infiniband is in the container and locked memory is unlimited (node.memlock).",
        r"ibv_(?:reg_mr|create_qp|open_device|modify_qp)\S* failed|Call to ibv_|NET/IB : No device found",
    ),
    Entry(
        "NCCL: no socket interface",
        "NCCL_SOCKET_IFNAME names no interface of this node (network.interface).",
        "Leave it out, or correct it in the site profile.",
        r"Bootstrap : no socket interface found|no socket interface found",
    ),
    Entry(
        "NCCL error",
        "The GPUs cannot talk to one another.",
        "NCCL_DEBUG=INFO names the reason; `wherry doctor` in a job measures every link.",
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError|ncclRemoteError|ncclInternalError",
    ),
    Entry(
        "rendezvous failed",
        "The ranks did not find each other: wrong MASTER_ADDR or port, a firewall, or a node that never started.",
        "network.address, network.port and network.interface of `wherry doctor` in a job.",
        r"RendezvousTimeoutError|RendezvousConnectionError|The client socket has (?:timed out|failed to connect)"
        r"|DistStoreError|connectFullMesh failed",
    ),
    Entry(
        "address already in use",
        "Another process has the port: a second job on the node, or one that did not end.",
        "Do not fix ports: slurm/train.sh derives MASTER_PORT from the job, serve finds a free one.",
        r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]",
    ),
    Entry(
        "ZeRO-3 did not split the model",
        "Every rank holds all weights: the model was loaded before the DeepSpeed configuration existed.",
        "Start through `wherry train`; in own code make TrainingArguments before from_pretrained.",
        r"ZeRO-3 did not split the model",
    ),
    Entry(
        "size mismatch",
        "Weights of another shape than the model's: embeddings that were resized, or another base (model.vocabulary).",
        "Prepare again with the base that the adapter was trained on.",
        r"size mismatch for",
    ),
    Entry(
        "damaged weights",
        "A safetensors file is not whole (model.shards).",
        "`wherry doctor RECIPE` names it; download it again.",
        r"SafetensorError|deserializing header|incomplete metadata",
    ),
    Entry(
        "Git LFS pointer",
        "The folder holds pointers in the place of weights.",
        "git lfs pull.",
        r"git-lfs\.github\.com/spec",
    ),
    Entry(
        "hub not reached",
        "A job tried to download, and compute nodes have no network.",
        "`wherry prepare` on the login node; jobs run offline on what it left.",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|(?:Failed to resolve|Max retries exceeded).*huggingface\.co",
    ),
    Entry(
        "gated model",
        "The hub asks for a licence that this account has not agreed to.",
        "Agree on the model's page, then `hf auth login` or HF_TOKEN, and prepare again.",
        r"GatedRepoError|Access to model .* is restricted|401 Client Error",
    ),
    Entry(
        "shared memory too small",
        "/dev/shm is full (node.shm): docker gives 64 MiB.",
        "`docker run --ipc=host` or `--shm-size=16g`.",
        r"[Bb]us error|unable to open shared memory object|insufficient shared memory|creating shared memory segment",
    ),
    Entry(
        "killed by the out-of-memory killer",
        "The job used more host memory than it asked for (plan.host).",
        "`--mem=0`, or more than `wherry plan --explain host` says.",
        r"oom[-_ ]kill|Out Of Memory|Killed process \d+|Exceeded job memory limit",
    ),
    Entry(
        "cannot allocate memory",
        "The node's memory is used up.",
        "`--mem=0`, fewer data loader workers.",
        r"DefaultCPUAllocator: can't allocate|Cannot allocate memory|std::bad_alloc|^MemoryError",
    ),
    Entry(
        "time limit reached",
        "Slurm ended the job at its time limit (script.signal, script.time).",
        "The same sbatch goes on from the newest checkpoint; `--signal=B:USR1@120` saves before the end.",
        r"DUE TO TIME LIMIT",
    ),
    Entry(
        "node failure",
        "A node of the job is gone.",
        "`--requeue` starts it again on others; the same sbatch goes on.",
        r"NODE_FAIL|DUE TO NODE FAILURE",
    ),
    Entry(
        "preempted or cancelled",
        "Somebody, or a job of higher priority, ended this one.",
        "The same sbatch goes on from the newest checkpoint.",
        r"DUE TO PREEMPTION|CANCELLED AT|CANCELLED DUE TO",
    ),
    Entry(
        "stale file handle",
        "A file on NFS was replaced while it was in use: mostly a compile cache (node.cache).",
        "Let WHERRY_CACHE name a local folder.",
        r"Stale file handle|\[Errno 116\]",
    ),
    Entry(
        "no space left",
        "A disk or quota is full. What was complete is kept.",
        "Free some space (df -h), start the same command again.",
        r"No space left on device|Disk quota exceeded|\[Errno 28\]",
    ),
    Entry(
        "permission denied or read-only",
        "A cache or output folder cannot be written (node.home, node.scratch).",
        "Let WHERRY_CACHE and WHERRY_RUNS name folders of your own.",
        r"Read-only file system|PermissionError|Permission denied",
    ),
    Entry(
        "too many open files",
        "The limit of open files is too low (node.nofile).",
        "`ulimit -n 4096` or more.",
        r"Too many open files|\[Errno 24\]",
    ),
    Entry(
        "PMI or MPI in the container",
        "Slurm's MPI support meets the container's.",
        "`srun --mpi=none`; training needs no MPI.",
        r"PMI\w*_Init|MPI_Init\w* .*(?:abort|fail)|OPAL ERROR|PMIX ERROR",
    ),
    Entry(
        "loss is not finite",
        "The loss or a gradient became NaN or infinite.",
        "Lower train.args.learning_rate, use bf16 rather than fp16, look for empty rows.",
        r"(?:'loss'|'grad_norm'|\bloss\b)\W+'?(?:nan|inf)\b",
    ),
    Entry(
        "torchrun: ChildFailedError",
        "A rank failed; torchrun says no more than that.",
        "Read the first error above it: that of the rank that failed first.",
        r"ChildFailedError|SignalException: Process \d+ got signal",
    ),
    Entry(
        "wrong package imported",
        "A package outside the image was found first (node.python).",
        "PYTHONNOUSERSITE=1, unset PYTHONPATH; entrypoints/entrypoint.sh does it.",
        r"undefined symbol|cannot import name '\w+' from '\w+' \(/(?:home|root)/",
    ),
    Entry(
        "server is not up",
        "A client asked before the server could answer, or after it had died.",
        "`wherry wait --run NAME` before the clients; runs/NAME/serve/state.json says why a server failed.",
        r"Server is not up yet|Connection refused|ConnectionRefusedError|ECONNREFUSED",
    ),
)


def all_messages() -> list[Entry]:
    """MESSAGES, then what serve knows of vLLM's log (wherry.serve.diagnose)."""
    return [*MESSAGES, *(_of_vllm(pattern, advice) for pattern, advice in KNOWN)]


def _of_vllm(pattern: str, advice: str) -> Entry:
    """Named by the words of its message: the pattern without its signs, up to the first alternative."""
    plain = re.sub(r"\(\?:(\w[^|)]*)[^)]*\)", r"\1", pattern)  # (?:one|other) → one
    plain = re.sub(r"\(?\\[dwS][+*]?\??\)?|\.[+*]|\[(\w)\w*\]", lambda found: found[1] or "…", plain.partition("|")[0])
    name = re.sub(r"[\\()\[\]^$?*]", "", plain).strip(" '")
    return Entry(f"vLLM: {name}", "vLLM's server did not start, or ended.", re.sub(r"\\\d", "N", advice), pattern)
