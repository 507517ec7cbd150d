"""What a log says: the line that decides and the setting to change, or how far the loading is.

The texts are those of vLLM 0.19 and torch.
"""

from __future__ import annotations

import re

# (text in the log, what to do), the more telling first. \1 in an advice is the value found.
KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"estimated maximum model length is (\d+)",
        r"set serve.vllm.max_model_len to \1 or less, or give the cache more memory "
        r"(serve.vllm.gpu_memory_utilization; VLLM_CPU_KVCACHE_SPACE on a CPU)",
    ),
    (
        r"larger than the (?:available KV cache memory|maximum number of tokens that can be stored in KV cache)"
        r"|No available memory for the cache blocks",
        r"lower serve.vllm.max_model_len, or raise serve.vllm.gpu_memory_utilization or tensor_parallel_size",
    ),
    (
        r"Free memory on device .* less than desired GPU memory utilization",
        r"another process holds memory of this GPU (nvidia-smi): end it, or lower serve.vllm.gpu_memory_utilization",
    ),
    (
        r"(?:CUDA|HIP) out of memory|OutOfMemoryError|CUDA error: out of memory",
        r"spread the model over more GPUs (serve.vllm.tensor_parallel_size), or lower serve.vllm.max_num_seqs, "
        r"max_model_len or gpu_memory_utilization",
    ),
    (
        r"DefaultCPUAllocator: can't allocate|Cannot allocate memory|std::bad_alloc|^MemoryError",
        r"the machine's memory is used up: ask for more (--mem), or lower VLLM_CPU_KVCACHE_SPACE on a CPU",
    ),
    (
        r"[Aa]ddress already in use|\[Errno 98\]",
        r"give another --port, or leave it out so that a free one is found",
    ),
    (
        r"SafetensorError|[Ee]rror while deserializing header|incomplete metadata",
        r"a weights file is damaged: remove complete.json beside its folder and run the mode that wrote it again",
    ),
    (
        r"Cannot find any model weights",
        r"the model's folder holds no safetensors: run the mode that writes it (prepare or merge) again",
    ),
    (
        r"instantiate the backend tokenizer|Can't load tokenizer|Unable to load vocabulary",
        r"the tokenizer's folder is incomplete or not of this model: run prepare again",
    ),
    (
        r"org_vocab_size|size mismatch for .*(?:embed|lm_head)|out of vocabulary|index out of range in self",
        r"embedding and tokenizer (or config.json) disagree on the vocabulary: run prepare, or merge, again",
    ),
    (
        r"Model architectures? \[?'?(\w+)'?\]? (?:are|is) not supported",
        r"this vLLM cannot serve \1: set serve.vllm.model_impl=transformers, or use a model that it knows",
    ),
    (
        r"max_model_len \(\d+\) is greater than the derived max_model_len \(\w+=(\d+)",
        r"set serve.vllm.max_model_len to \1 or less: it is all that the model was made for",
    ),
    (
        r"attention heads \((\d+)\) must be divisible by tensor parallel size",
        r"set serve.vllm.tensor_parallel_size to a number that divides the model's \1 attention heads",
    ),
    (
        r"World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)",
        r"\2 GPUs are visible: set serve.vllm.tensor_parallel_size to that, or ask the scheduler for \1",
    ),
    (
        r"invalid device ordinal|not enough GPUs|placement group.* cannot be",
        r"fewer GPUs are visible than serve.vllm.tensor_parallel_size asks for: lower it, or ask for more GPUs",
    ),
    (
        r"driver on your system is too old|driver version is insufficient|unsupported toolchain"
        r"|no kernel image is available",
        r"the NVIDIA driver or the GPU does not fit this image's CUDA: use a node with a newer one (docs/images.md)",
    ),
    (
        r"Bfloat16 is only supported on GPUs",
        r"set serve.vllm.dtype=half: this GPU is older than bfloat16",
    ),
    (
        r"`trust_remote_code=True`|`--trust-remote-code`",
        r"the model brings Python code of its own: set model.trust_remote_code=true if you trust it",
    ),
    (
        r"unrecognized arguments: (.+)",
        r"this vLLM has no such option: remove it from serve.vllm, or correct its name",
    ),
    (
        r"error: argument -\S*?--([\w-]+)|error: argument --([\w-]+)",
        r"correct the value of \1\2 (with underscores) under serve.vllm",
    ),
    (
        r"No adapter found for|LoRA rank \d+ is greater than max_lora_rank",
        r"correct serve.vllm.lora_modules or max_lora_rank, or merge the adapter (wherry merge) and serve that",
    ),
    (
        r"/dev/shm|Bus error|unable to open shared memory object",
        r"shared memory is too small: start the container with --ipc=host or a larger --shm-size",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        r"free some space, or let WHERRY_CACHE name a folder on a larger file system",
    ),
    (
        r"PermissionError|Permission denied|Read-only file system",
        r"let WHERRY_CACHE (or VLLM_CACHE_ROOT, HF_HOME, TRITON_CACHE_DIR) name a folder that you may write to",
    ),
    (
        r"OSError: \[Errno 24\]|Too many open files",
        r"raise the limit of open files before the start (ulimit -n)",
    ),
    (
        r"Failed to find C compiler",
        r"set serve.vllm.enforce_eager=true, or serve in the image, which has a compiler",
    ),
    (
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError|ncclRemoteError",
        r"the GPUs cannot talk to one another: start again with NCCL_DEBUG=INFO to see why",
    ),
    (
        r"Unsupported CPU attention configuration: head_dim=(\d+)",
        r"vLLM's CPU build has no attention for heads of \1 numbers: serve this model on a GPU",
    ),
)
# The engine is gone and said nothing itself.
KILLED = re.compile(r"died unexpectedly|EngineDeadError")
KILLED_ADVICE = "the engine was killed: mostly by the out-of-memory killer (see dmesg, or ask for more --mem)"
UNKNOWN = "read the log from its first error on (docs/serve.md)"

# What vLLM puts before a line: "(EngineCore pid=7) ERROR 12-01 04:55:45 [core.py:1108] ".
PREFIX = re.compile(r"^(?:\(\w+(?:[ \w]*)pid=\d+\) ?)?(?:(?P<level>[A-Z]+) \d\d-\d\d [\d:]+ \[[\w./]+:\d+\] ?)?")
EXCEPTION = re.compile(r"^(?:Value error, .|(?:\w+\.)*\w*(?:Error|Exception|Died|Interrupt)\b(?::|$))")
# Says only that something else went wrong.
SECOND_HAND = re.compile(r"See root cause above|See stack trace \(above\)|\bValidationError: \d+ validation error")


def diagnose(log_text: str) -> tuple[str, str]:
    """(the decisive line, what to do) of a log; ("", UNKNOWN) where nothing in it looks like an error.

    An unknown error's line is the last that begins with an exception: what follows it is the traceback's tail.
    """
    lines = list(_errors(log_text))
    for text, advice in KNOWN:
        for line in lines:
            if match := re.search(text, line):
                return _short(line), _filled(match, advice)
    exceptions = [line for line in lines if EXCEPTION.match(line) and not SECOND_HAND.search(line)]
    if exceptions:
        return _short(exceptions[-1]), UNKNOWN
    killed = [line for line in lines if KILLED.search(line)]
    return (_short(killed[0]), KILLED_ADVICE) if killed else ("", UNKNOWN)


def _errors(log_text: str) -> list[str]:
    """Lines without vLLM's prefix; what it calls a warning or information is none of them."""
    found = []
    for line in log_text.splitlines():
        prefix = PREFIX.match(line)
        if prefix and prefix["level"] in ("DEBUG", "INFO", "WARNING"):
            continue
        found.append(line[prefix.end() if prefix else 0 :].strip())
    return found


def _filled(match: re.Match[str], advice: str) -> str:
    return re.sub(r"\\(\d)", lambda number: match[int(number[1])] or "", advice)


def _short(line: str) -> str:
    line = line.partition(" [type=")[0]  # pydantic's dump of all its input
    return line if len(line) <= 240 else line[:239] + "…"


# A line of a log that goes well → what the server is doing. \1 as above.
STEPS: tuple[tuple[str, str], ...] = (
    (r"Starting to load model", r"loading weights"),
    (r"Loading .*checkpoint shards: +\d+% Completed \| (\d+/\d+)", r"loading weights, file \1"),
    (r"Loading weights took|Model loading took", r"weights loaded"),
    (r"Dynamo bytecode|Compiling a graph|torch\.compile takes", r"compiling"),
    (r"KV cache size: ([\d,]+) tokens", r"cache for \1 tokens"),
    (r"Capturing CUDA graphs", r"capturing CUDA graphs"),
    (r"Warming up model", r"warming up"),
    (r"init engine .* took", r"engine started"),
    (r"Starting vLLM server", r"starting to answer"),
)


def progress(log_text: str) -> str | None:
    """What the last telling line of a log says that the server is doing, or None where there is no such line."""
    for line in reversed(log_text.replace("\r", "\n").splitlines()):
        for text, step in STEPS:
            if match := re.search(text, line):
                return _filled(match, step)
    return None
