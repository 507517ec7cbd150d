"""Which argument names the libraries accept, read from their own source without importing them.

Importing TRL or vLLM takes seconds; parsing the file of a dataclass takes milliseconds, and the installed library
stays the only place where its names are written down.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

# Recipe key → the classes, (package, file, class), whose fields it passes through.
SOURCES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "train.args": (
        ("trl", "trainer/sft_config.py", "SFTConfig"),
        ("trl", "trainer/base_config.py", "_BaseConfig"),
        ("transformers", "training_args.py", "TrainingArguments"),
    ),
    "train.lora": (("peft", "tuners/lora/config.py", "LoraConfig"),),
    "train.quantization": (("transformers", "utils/quantization_config.py", "BitsAndBytesConfig"),),
    "serve.vllm": (
        ("vllm", "engine/arg_utils.py", "EngineArgs"),
        ("vllm", "engine/arg_utils.py", "AsyncEngineArgs"),
        ("vllm", "entrypoints/openai/cli_args.py", "BaseFrontendArgs"),
        ("vllm", "entrypoints/openai/cli_args.py", "FrontendArgs"),
    ),
}


@functools.cache
def accepted(key: str) -> frozenset[str]:
    """Argument names that may stand below a recipe key such as "train.args"."""
    return frozenset().union(*(_fields(*source) for source in SOURCES[key]))


def _fields(package: str, file: str, class_name: str) -> set[str]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed: run containers/install.sh")
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    names: set[str] = set()
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            names |= {a.arg for a in (*item.args.args, *item.args.kwonlyargs)} - {"self"}
    return {name for name in names if not name.startswith("_")}
