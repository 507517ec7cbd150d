"""Logs of servers that failed: the line that decides, and the setting to change."""

import pytest

from wherry.serve.diagnose import UNKNOWN, diagnose, progress

API, CORE = "(APIServer pid=7034) ", "(EngineCore pid=7205) "
CORE_ERROR = CORE + "ERROR 12-01 04:55:45 [core.py:1108] "
SECOND_HAND = (
    f"{API}    raise RuntimeError(\n{API}RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {'EngineCore': 1}\n"
)
PYDANTIC = API + "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n" + API + "  "
FURTHER = (
    f" [type=value_error, input_value=ArgsKwargs(...)]\n{API}    For further information visit https://x/value_error\n"
)

# (log, begin of the decisive line, a part of the advice); the first eight were provoked on vLLM 0.19.1's CPU build.
CASES = {
    "context": (
        PYDANTIC
        + "Value error, User-specified max_model_len (100000) is greater than the derived max_model_len "
        + "(max_position_embeddings=8192.0 or model_max_length=None in model's config.json)."
        + FURTHER,
        "Value error, User-specified max_model_len (100000)",
        "serve.vllm.max_model_len to 8192 or less",
    ),
    "heads": (
        PYDANTIC
        + "Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2)."
        + FURTHER,
        "Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2).",
        "serve.vllm.tensor_parallel_size to a number that divides the model's 9 attention heads",
    ),
    "architecture": (
        PYDANTIC + "Value error, Model architectures ['NoSuchForCausalLM'] are not supported for now." + FURTHER,
        "Value error, Model architectures ['NoSuchForCausalLM']",
        "this vLLM cannot serve NoSuchForCausalLM: set serve.vllm.model_impl",
    ),
    "weights": (
        CORE_ERROR
        + "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: invalid header length\n"
        + SECOND_HAND,
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header",
        "a weights file is damaged",
    ),
    "no weights": (
        CORE_ERROR + "RuntimeError: Cannot find any model weights with `m`\n" + SECOND_HAND,
        "RuntimeError: Cannot find any model weights",
        "holds no safetensors",
    ),
    "vocabulary": (
        f"{CORE_ERROR}    assert loaded_weight.shape[output_dim] == self.org_vocab_size\n{CORE_ERROR}AssertionError\n"
        + SECOND_HAND,
        "assert loaded_weight.shape",
        "disagree on the vocabulary",
    ),
    "tokenizer": (
        API + "ValueError: Couldn't instantiate the backend tokenizer from one of: \n",
        "ValueError: Couldn't instantiate the backend tokenizer",
        "run prepare again",
    ),
    "arguments": (
        "usage: api_server.py [--trust-remote-code | --no-trust-remote-code]\n"
        "api_server.py: error: unrecognized arguments: --max-modl-len 12\n",
        "api_server.py: error: unrecognized arguments: --max-modl-len 12",
        "no such option",
    ),
    "argument's value": (
        "api_server.py: error: argument --max-model-len: Value tall cannot be converted\n",
        "api_server.py: error: argument --max-model-len",
        "max-model-len (with underscores) under serve.vllm",
    ),
    "cache": (
        CORE
        + "ValueError: To serve at least one request with the models's max seq len (131072), (2.81 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the "
        "estimated maximum model length is 46592. Try increasing `gpu_memory_utilization`\n" + SECOND_HAND,
        "ValueError: To serve at least one request",
        "serve.vllm.max_model_len to 46592 or less",
    ),
    "cache, earlier wording": (
        "ValueError: The model's max seq len (8192) is larger than the maximum number of tokens that can be stored in "
        "KV cache (512).\n",
        "ValueError: The model's max seq len",
        "lower serve.vllm.max_model_len",
    ),
    "no cache": (CORE + "ValueError: No available memory for the cache blocks.\n", "ValueError: No", "max_model_len"),
    "GPU memory": (
        CORE_ERROR + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.\n" + SECOND_HAND,
        "torch.OutOfMemoryError: CUDA out of memory",
        "serve.vllm.tensor_parallel_size",
    ),
    "GPU shared": (
        CORE + "ValueError: Free memory on device cuda:0 (3.1/79.3 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 71.4 GiB).\n",
        "ValueError: Free memory on device cuda:0",
        "another process holds memory of this GPU",
    ),
    "host memory": ("std::bad_alloc\n", "std::bad_alloc", "--mem"),
    "port": (
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use\n",
        "ERROR:    [Errno 98]",
        "leave it out",
    ),
    "GPUs": (
        PYDANTIC
        + "Value error, World size (8) is larger than the number of available GPUs (1) in this node."
        + FURTHER,
        "Value error, World size (8)",
        "1 GPUs are visible: set serve.vllm.tensor_parallel_size to that, or ask the scheduler for 8",
    ),
    "device": (CORE + "torch.AcceleratorError: CUDA error: invalid device ordinal\n", "torch.", "ask for more GPUs"),
    "driver": (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).\n",
        "RuntimeError: The NVIDIA driver",
        "driver",
    ),
    "cache folder": (
        "PermissionError: [Errno 13] Permission denied: '/home/a/.cache/vllm'\n",
        "PermissionError: [Errno 13]",
        "WHERRY_CACHE",
    ),
    "disk": ("OSError: [Errno 28] No space left on device: '/tmp/x'\n", "OSError: [Errno 28]", "free some space"),
    "shared memory": (
        "RuntimeError: unable to open shared memory object </torch_1> in read-write mode\n",
        "RuntimeError: unable to open shared memory",
        "--ipc=host",
    ),
    "remote code": (
        PYDANTIC + "Value error, Please pass the argument `trust_remote_code=True` to allow custom code." + FURTHER,
        "Value error, Please pass",
        "model.trust_remote_code=true",
    ),
    "CPU attention": (
        f"{CORE_ERROR}RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2\n"
        f"{API}ERROR 12-01 05:31:24 [async_llm.py:707] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
        "encountered an issue. See stack trace (above) for the root cause.\n",
        "RuntimeError: Unsupported CPU attention",
        "heads of 16 numbers",
    ),
    "engine": (
        API
        + "ERROR 12-01 04:57:31 [core_client.py:610] Engine core proc EngineCore died unexpectedly, shutting down.\n",
        "Engine core proc EngineCore died unexpectedly",
        "out-of-memory killer",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_known_failures_name_the_setting(case):
    log, line, advice = CASES[case]
    found_line, found_advice = diagnose("(APIServer pid=1) INFO 12-01 04:39:28 [utils.py:299] version 0.19.1\n" + log)
    assert found_line.startswith(line)
    assert advice in found_advice
    assert "\\" not in found_advice


def test_an_unknown_error_is_the_last_exception_not_the_traceback_s_tail():
    log = (
        f"{CORE_ERROR}KeyError: 'early'\n{CORE_ERROR}Traceback (most recent call last):\n"
        f"{CORE_ERROR}mypackage.errors.StrangeError: the real cause\n{SECOND_HAND}"
        "[rank0]: some farewell of a library\n"
    )
    assert diagnose(log) == ("mypackage.errors.StrangeError: the real cause", UNKNOWN)


def test_warnings_and_information_decide_nothing():
    log = (
        f"{API}WARNING 12-01 04:39:28 [system_utils.py:289] This can cause `OSError: [Errno 24] Too many open files`\n"
        f"{API}WARNING 12-01 04:39:28 [parallel.py:512] Address already in use. Retrying with a new port.\n"
        f"{API}INFO 12-01 04:39:28 [x.py:1] CUDA out of memory is handled\n"
    )
    assert diagnose(log) == ("", UNKNOWN)
    assert diagnose("") == ("", UNKNOWN)


def test_long_lines_are_cut():
    line, _ = diagnose("ValueError: " + "x" * 5000)
    assert len(line) == 240


@pytest.mark.parametrize(
    ("log", "step"),
    [
        ("", None),
        ("INFO nothing of interest\n", None),
        ("INFO 1 [a.py:1] Starting to load model /m...\n", "loading weights"),
        ("Loading safetensors checkpoint shards:  10% Completed | 3/30 [00:01<00:09]\n", "loading weights, file 3/30"),
        ("Loading safetensors checkpoint shards:   3% Completed | 1/30 [0\rLoading safetensors checkpoint shards:"
         "   7% Completed | 2/30 [0", "loading weights, file 2/30"),
        ("Starting to load model x\nINFO GPU KV cache size: 46,592 tokens\nmore\n", "cache for 46,592 tokens"),
        ("Starting vLLM server on http://127.0.0.1:1\n", "starting to answer"),
    ],
)  # fmt: skip
def test_progress_is_the_last_telling_line(log, step):
    assert progress(log) == step
