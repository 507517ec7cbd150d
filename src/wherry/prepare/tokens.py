"""The tokenizer that a run uses, and the token contract that every later mode checks again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wherry.cli import say
from wherry.errors import Exit, WherryError
from wherry.files import atomic_directory, read_json, write_json
from wherry.recipe.schema import Recipe
from wherry.safetensors_file import checkpoint


def load_tokenizer(folder: Path, recipe: Recipe) -> Any:
    """The model's own tokenizer, with the recipe's chat template if it gives one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=recipe.model.trust_remote_code)
    except Exception as error:  # a damaged tokenizer.json fails in many ways, all of them the file's fault
        raise WherryError(
            f"the tokenizer cannot be read: {str(error).splitlines()[0][:200]}",
            str(folder.resolve()),
            "download the model again; a model with its own code needs model.trust_remote_code=true",
            Exit.PREFLIGHT,
        ) from error
    if not tokenizer.is_fast:
        raise WherryError(
            "the tokenizer has no fast version (tokenizer.json)", str(folder), "convert it with transformers first"
        )
    if recipe.data.chat_template:
        path = Path(recipe.data.chat_template)
        if not path.is_file():
            raise WherryError(f"no file {path}", "data.chat_template", "correct the path")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    tokenizer.clean_up_tokenization_spaces = False  # made for WordPiece: it corrupts what BPE decodes
    tokenizer.padding_side = "right"
    return tokenizer


def stop_ids(folder: Path) -> list[int]:
    """Token ids that end a generation, as generation_config.json, else config.json, gives them."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        if value is not None:
            return sorted({value} if isinstance(value, int) else {int(i) for i in value})
    return []


def context_length(folder: Path) -> int:
    """Positions that the model was made for. Tokenizers often say 1e30, or the length of another model."""
    config = read_json(folder / "config.json")
    value = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    if not value:
        raise WherryError("max_position_embeddings is missing", str(folder / "config.json"), "add it to config.json")
    return int(value)


def choose_pad(tokenizer: Any, stops: Iterable[int], rows: int, used: Iterable[int] = ()) -> int | None:
    """The tokenizer's own pad id where it can serve, else a reserved token of the vocabulary, else None.

    A pad that equals eos is masked out of the labels, and the model never learns to stop; one outside the
    embedding is a device-side assert.
    """
    taken = {*stops, *used, tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    own = tokenizer.pad_token_id
    if own is not None and own not in taken and own < rows:
        return own
    template = tokenizer.chat_template or ""
    reserved = [
        (token_id, token.content)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id < rows and token_id not in taken and token.content not in str(template)
    ]

    def preference(item: tuple[int, str]) -> tuple[int, int]:
        name = item[1].lower()
        for rank, word in enumerate(("pad", "reserved", "unused", "extra", "empty")):
            if word in name:
                return rank, item[0]
        return 99, -item[0]  # no name for it: the last one is the least likely to be used

    return min(reserved, key=preference)[0] if reserved else None


def embedding_rows(folder: Path) -> int:
    """Rows of the input embedding on disk: what ids are really compared with (config.vocab_size may be wrong)."""
    tensors = checkpoint(folder).tensors
    for name, (_, info) in tensors.items():
        if name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight")):
            return info.shape[0]
    raise WherryError(
        "no input embedding among the tensors", str(folder), "use a causal language model", Exit.PREFLIGHT
    )


def contract(tokenizer: Any, folder: Path, stops: list[int], largest_id: int, max_length: int) -> dict[str, Any]:
    """What every later mode must find again. Counts are of tokens or rows; ids are token ids."""
    return {
        "tokenizer_len": len(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "embedding_rows": embedding_rows(folder),
        "largest_id": largest_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "eos_token_ids": stops,
        "pad_token_id": tokenizer.pad_token_id,
        "chat_template_sha256": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "context_length": context_length(folder),
        "max_length": max_length,
    }


def check_contract(made: dict[str, Any]) -> None:
    """Raises WherryError (exit 3) where ids do not fit the embedding, or where pad would hide eos."""
    rows = made["embedding_rows"]
    fix = "use the tokenizer that belongs to the model; never resize the embedding down to the tokenizer"
    for name in ("tokenizer_len", "largest_id", "pad_token_id", "eos_token_id"):
        value = made[name]
        if value is None:
            raise WherryError(f"{name} is not set", "token contract", "set it in tokenizer_config.json", Exit.PREFLIGHT)
        if value - (name == "tokenizer_len") >= rows:
            raise WherryError(
                f"{name} is {value}, the embedding has {rows} rows", "token contract", fix, Exit.PREFLIGHT
            )
    if made["pad_token_id"] in made["eos_token_ids"]:
        raise WherryError(
            f"the pad token is a stop token ({made['pad_token_id']})",
            "token contract",
            "give the tokenizer a pad token of its own",
            Exit.PREFLIGHT,
        )


def save_tokenizer(tokenizer: Any, stops: list[int], model: Path, target: Path) -> None:
    """Write the run's tokenizer, and the generation config that stops where the data's answers stop."""
    with atomic_directory(target) as part:
        tokenizer.save_pretrained(part)
        own = model / "generation_config.json"
        generation = read_json(own) if own.is_file() else {"_from_model_config": True}
        generation |= {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": stops[0] if len(stops) == 1 else stops,
            "pad_token_id": tokenizer.pad_token_id,
        }
        write_json(part / "generation_config.json", generation)


def settle_stop(tokenizer: Any, stops: list[int], last_id: int, where: str) -> list[int]:
    """Make sure that the token which ends the data's answers is one that ends a generation.

    last_id: the last learned id of a row. Raises WherryError (exit 2) where answers end in ordinary text.
    """
    token = tokenizer.convert_ids_to_tokens(last_id)
    if last_id not in stops:
        if last_id not in tokenizer.all_special_ids and last_id not in tokenizer.added_tokens_decoder:
            raise WherryError(
                f"an answer ends with {token!r}, not with a stop token: the model would never learn to stop",
                where,
                "give a template that ends the assistant's turn with a special token (data.chat_template)",
            )
        say(f"tokens: {token} ({last_id}) ends the assistant's turns and now also ends generation")
        stops = sorted({*stops, last_id})
    if tokenizer.eos_token_id not in stops:
        say(f"tokens: eos was {tokenizer.eos_token!r}, which no answer ends with; now {token!r} ({last_id})")
        tokenizer.eos_token = token
    return stops
