"""Bring the model into the run directory: a local folder, a hub snapshot, or a GGUF file turned into safetensors."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from wherry.cli import say
from wherry.errors import Exit, WherryError
from wherry.files import atomic_directory, require_space
from wherry.recipe.schema import Model
from wherry.safetensors_file import checkpoint

# What a causal language model needs: never pickles, never the original framework's copies.
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
HUB_IGNORED = ["original/*", "metal/*", "onnx/*", "consolidated*"]


def stage_model(model: Model, target: Path) -> dict[str, Any]:
    """Make target a sound model folder (a link where nothing has to be written); returns where it came from.

    Raises WherryError: exit 2 for a name that leads nowhere, exit 3 for a model that is not whole.
    """
    path = Path(model.name).expanduser()
    if path.suffix == ".gguf":
        source = _from_gguf(path, target)
    elif path.is_dir():
        source = _link(path, target) | {"kind": "folder", "name": str(path)}
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", model.name) and not path.is_file():
        source = _from_hub(model, target)
    else:
        raise WherryError(
            f"no model at {model.name}",
            "model.name",
            "give a folder with config.json and safetensors, a .gguf file, or a hub id such as org/name",
        )
    if not (target / "config.json").is_file():
        raise WherryError("config.json is missing", str(target.resolve()), "download the model again", Exit.PREFLIGHT)
    checkpoint(target)
    return source


def identity(folder: Path) -> dict[str, Any]:
    """What tells this model from another: bytes of its tensors, number of files, fingerprint."""
    whole = checkpoint(folder)
    return {"bytes": whole.total_size, "files": len(whole.files), "fingerprint": fingerprint(whole.files)}


def _link(folder: Path, target: Path) -> dict[str, Any]:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()
    elif target.is_dir():  # of an attempt that gave the embedding more rows
        shutil.rmtree(target)
    target.symlink_to(folder.resolve(), target_is_directory=True)
    return {"path": str(folder.resolve())}


def _from_hub(model: Model, target: Path) -> dict[str, Any]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    say(f"model: {model.name} from the hub (kept in HF_HOME, shared by all runs)")
    try:
        folder = Path(
            snapshot_download(
                model.name, revision=model.revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED
            )
        )
    except GatedRepoError:
        raise _hub_error(model, "is gated", "accept its terms on its page and set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise _hub_error(model, f"has no revision {model.revision!r}", "correct model.revision") from None
    except RepositoryNotFoundError:
        raise _hub_error(
            model, "is not on the hub, nor a folder here", "correct model.name; a private one needs HF_TOKEN"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise _hub_error(
            model,
            f"cannot be fetched: {reason}",
            "run prepare where the network is (a login node), or give a local folder as model.name",
            Exit.PREFLIGHT,
        ) from error
    # The snapshot folder is named after the commit.
    return _link(folder, target) | {"kind": "hub", "name": model.name, "revision": folder.name}


def _hub_error(model: Model, what: str, fix: str, code: Exit = Exit.USAGE) -> WherryError:
    return WherryError(f"{model.name} {what}", "model.name", fix, code)


def _from_gguf(path: Path, target: Path) -> dict[str, Any]:
    """Dequantise with transformers and save bfloat16 safetensors, once: a killed conversion leaves nothing behind."""
    if not path.is_file():
        raise WherryError(f"no file {path}", "model.name", "correct the path; `make demo` fetches the demo's model")
    source = {"kind": "gguf", "name": str(path)}
    if target.is_dir():
        return source
    # 4-bit to 16-bit, and the file itself may be of 2 to 16 bits a weight.
    require_space(target.parent, 8 * path.stat().st_size, "turning the GGUF file into safetensors")
    say(f"model: {path.name} → bfloat16 safetensors")
    try:
        with atomic_directory(target) as part:
            _convert(path, part)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # A file that is cut short fails somewhere in numpy, one that is no GGUF at its magic, each in its own words.
        reason = " ".join(str(error).split())[:160] or repr(error)
        raise WherryError(
            f"{path.name} ({path.stat().st_size} bytes) is not a whole GGUF file that transformers reads: {reason}",
            str(path),
            "download it again and compare its size",
            Exit.PREFLIGHT,
        ) from error
    return source


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The converted tokenizer may carry default bos and eos tokens; the configuration has the file's own ids.
    for name in ("bos", "eos"):
        token_id = getattr(model.config, f"{name}_token_id")
        if isinstance(token_id, int):
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def fingerprint(files: list[Path]) -> str:
    """sha256 over names, sizes and the first and last 64 KiB of each file: another model is told apart in no time."""
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            digest.update(file.read(65536))
            file.seek(max(0, size - 65536), os.SEEK_SET)
            digest.update(file.read(65536))
    return digest.hexdigest()
