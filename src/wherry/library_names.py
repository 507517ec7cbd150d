"""Which argument names the libraries accept, read from their own source without importing them.

Importing TRL or vLLM takes seconds; parsing the file of a dataclass takes milliseconds, and the installed library
stays the only place where its names are written down.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path

from wherry.errors import Exit, WherryError

Source = tuple[str, str, str]  # package, file, class or function

# What train.args takes depends on train.objective.
_TRAINING: tuple[Source, ...] = (
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
OBJECTIVES: dict[str, tuple[Source, ...]] = {
    "sft": (("trl", "trainer/sft_config.py", "SFTConfig"), *_TRAINING),
    "dpo": (("trl", "trainer/dpo_config.py", "DPOConfig"), *_TRAINING),
}

# Recipe key → the classes and functions whose arguments it passes through.
SOURCES: dict[str, tuple[Source, ...]] = {
    "train.args": OBJECTIVES["sft"],
    "train.lora": (("peft", "tuners/lora/config.py", "LoraConfig"),),
    "train.quantization": (("transformers", "utils/quantization_config.py", "BitsAndBytesConfig"),),
    "serve.vllm": (
        ("vllm", "engine/arg_utils.py", "EngineArgs"),
        ("vllm", "engine/arg_utils.py", "AsyncEngineArgs"),
        ("vllm", "entrypoints/openai/cli_args.py", "BaseFrontendArgs"),
        ("vllm", "entrypoints/openai/cli_args.py", "FrontendArgs"),
    ),
    "eval.args": (
        ("inspect_ai", "_eval/eval.py", "eval"),
        ("inspect_ai", "model/_generate_config.py", "GenerateConfigArgs"),
    ),
}


def sources(key: str, objective: str) -> tuple[Source, ...]:
    """Where the names below a recipe key come from; the first source is the one to name to a user."""
    return OBJECTIVES[objective] if key == "train.args" else SOURCES[key]


@functools.cache
def accepted(key: str, objective: str = "sft") -> frozenset[str]:
    """Argument names that may stand below a recipe key such as "train.args"."""
    return frozenset().union(*(_fields(*source) for source in sources(key, objective)))


def _fields(package: str, file: str, name: str) -> set[str]:
    """Field names of a class, or argument names of its __init__ or of a function."""
    tree = _parsed(_folder(package) / file)
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
    names: set[str] = set()
    for item in [node] if isinstance(node, ast.FunctionDef) else node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, ast.FunctionDef) and item.name in ("__init__", name):
            names |= {a.arg for a in (*item.args.args, *item.args.kwonlyargs)} - {"self"}
    return {name for name in names if not name.startswith("_")}


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _folder(package: str) -> Path:
    """Where a package lies: in this environment, or in the evaluation's, which stands inside it."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    found = list(Path(sys.prefix).glob(f"eval/lib/python3*/site-packages/{package}"))
    if not found:
        raise WherryError(
            f"{package} is not installed", sys.prefix, "run containers/install.sh .venv --editable", Exit.PREFLIGHT
        )
    return found[0]
