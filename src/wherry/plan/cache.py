"""vLLM's memory: weights, what a forward pass needs, and what is left for the KV cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from wherry.plan.gpus import Gpus
from wherry.plan.shapes import Shape

GIB = 2**30
GRAPHS = 1.5 * GIB  # CUDA graphs, NCCL, workspaces; seen, not computed
BATCHED_TOKENS = 8192  # vLLM's max_num_batched_tokens for a server on a large GPU


@dataclass(frozen=True)
class Served:
    """Bytes of one GPU. largest: tokens of one request that the cache and the model's own context allow."""

    parallel: int
    weights: float
    working: float
    cache: float
    per_token: float
    asked: int
    largest: int
    smallest_parallel: int | None
    how: str

    @property
    def fits(self) -> bool:
        return self.largest >= self.asked > 0

    @property
    def tokens(self) -> int:
        """That the cache holds, of all requests together."""
        return max(0, int(self.cache / self.per_token))


def served(shape: Shape, gpus: Gpus, vllm: dict[str, Any]) -> Served:
    """The server of a recipe's serve.vllm, with vLLM's own names and defaults."""
    parallel = int(vllm.get("tensor_parallel_size") or 1)
    made = _with(shape, gpus, vllm, parallel)
    enough = [n for n in divisors(shape, gpus.per_node) if _with(shape, gpus, vllm, n).fits]
    return Served(**{**made.__dict__, "smallest_parallel": min(enough, default=None)})


def tokens(value: Any, own: int) -> int:
    """vLLM's max_model_len: a number, 8k (thousands), 8K (of 1,024), auto or -1; own: the model's."""
    if value is None or str(value) in ("auto", "-1"):
        return own
    found = re.fullmatch(r"([\d.]+)([kKmM]?)", str(value))
    if not found:
        raise ValueError(f"serve.vllm.max_model_len={value!r}")
    return int(float(found[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[found[2]])


def divisors(shape: Shape, largest: int) -> list[int]:
    """Numbers of GPUs that divide the attention heads, as tensor parallelism needs them to."""
    return [n for n in range(1, largest + 1) if shape.heads % n == 0]


def _with(shape: Shape, gpus: Gpus, vllm: dict[str, Any], parallel: int) -> Served:
    share = float(vllm.get("gpu_memory_utilization") or 0.9)
    asked = tokens(vllm.get("max_model_len"), shape.context)
    number = 1 if str(vllm.get("kv_cache_dtype", "")).startswith("fp8") else 2
    heads = max(1, shape.kv_heads // parallel)  # fewer heads than GPUs: each GPU keeps a copy of one
    per_token = 2.0 * shape.layers * heads * shape.head * number
    weights = 2.0 * shape.parameters / parallel
    batched = int(vllm.get("max_num_batched_tokens") or BATCHED_TOKENS)
    working = batched * (2 * shape.inner / parallel + 4 * shape.hidden) * 2.0 + GRAPHS
    cache = share * gpus.memory * GIB - weights - working
    largest = max(0, min(shape.context, int(cache / per_token)))
    how = (
        f"{share} × {gpus.memory:.1f} GiB - {weights / GIB:.1f} GiB of weights - {working / GIB:.1f} GiB to work in = "
        f"{cache / GIB:.1f} GiB; a token takes 2 × {shape.layers} layers × {heads} heads × {shape.head} × {number} B = "
        f"{per_token:,.0f} B"
    )
    return Served(parallel, weights, working, cache, per_token, asked, largest, None, how)
