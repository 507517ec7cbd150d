"""Shapes of models that recipes name most, from their public config.json, for planning before anything is fetched.

Columns: vocabulary, hidden, inner (intermediate), layers, heads, KV heads, head size, tied embeddings, bias on q, k
and v, context length. Names are the last part of a hub id, in lower case.
"""

from __future__ import annotations

from wherry.plan.shapes import Shape

_LLAMA_3 = {
    "1b": (128256, 2048, 8192, 16, 32, 8, 64, True, False, 131072),
    "3b": (128256, 3072, 8192, 28, 24, 8, 128, True, False, 131072),
    "8b": (128256, 4096, 14336, 32, 32, 8, 128, False, False, 131072),
    "70b": (128256, 8192, 28672, 80, 64, 8, 128, False, False, 131072),
}
_QWEN_25 = {
    "0.5b": (151936, 896, 4864, 24, 14, 2, 64, True, True, 32768),
    "1.5b": (151936, 1536, 8960, 28, 12, 2, 128, True, True, 32768),
    "3b": (151936, 2048, 11008, 36, 16, 2, 128, True, True, 32768),
    "7b": (152064, 3584, 18944, 28, 28, 4, 128, False, True, 32768),
    "14b": (152064, 5120, 13824, 48, 40, 8, 128, False, True, 32768),
    "32b": (152064, 5120, 27648, 64, 40, 8, 128, False, True, 32768),
    "72b": (152064, 8192, 29568, 80, 64, 8, 128, False, True, 32768),
}
_SMOLLM2 = {
    "135m": (49152, 576, 1536, 30, 9, 3, 64, True, False, 8192),
    "360m": (49152, 960, 2560, 32, 15, 5, 64, True, False, 8192),
    "1.7b": (49152, 2048, 8192, 24, 32, 32, 64, True, False, 8192),
}
_OTHERS = {
    "meta-llama-3-8b": (*_LLAMA_3["8b"][:-1], 8192),
    "meta-llama-3-70b": (*_LLAMA_3["70b"][:-1], 8192),
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32, 128, False, False, 4096),
    "llama-2-13b": (32000, 5120, 13824, 40, 40, 40, 128, False, False, 4096),
    "llama-2-70b": (32000, 8192, 28672, 80, 64, 8, 128, False, False, 4096),
    "mistral-7b-v0.1": (32000, 4096, 14336, 32, 32, 8, 128, False, False, 32768),
    "mistral-7b-v0.3": (32768, 4096, 14336, 32, 32, 8, 128, False, False, 32768),
}
KNOWN: dict[str, tuple[int, int, int, int, int, int, int, bool, bool, int]] = {
    **{f"llama-3.2-{size}": _LLAMA_3[size] for size in ("1b", "3b")},
    **{f"llama-3.1-{size}": _LLAMA_3[size] for size in ("8b", "70b")},
    **{f"meta-llama-3.1-{size}": _LLAMA_3[size] for size in ("8b", "70b")},
    "llama-3.3-70b": _LLAMA_3["70b"],
    **{f"deepseek-r1-distill-llama-{size}": _LLAMA_3[size] for size in ("8b", "70b")},
    **{f"deepseek-r1-distill-qwen-{size}": (*_QWEN_25[size][:-1], 131072) for size in ("7b", "14b", "32b")},
    **{f"qwen2.5-{size}": row for size, row in _QWEN_25.items()},
    **{f"qwen2.5-coder-{size}": row for size, row in _QWEN_25.items() if size != "72b"},
    **{f"smollm2-{size}": row for size, row in _SMOLLM2.items()},
    **_OTHERS,
}


def find(name: str) -> Shape | None:
    """The shape of a hub id, a folder or a file by its name, whatever tuned version of the model it is."""
    last = name.rstrip("/").rpartition("/")[2].lower().replace("-instruct", "")
    matches = [key for key in KNOWN if last == key or last.startswith((f"{key}-", f"{key}."))]
    return Shape(*KNOWN[max(matches, key=len)]) if matches else None
