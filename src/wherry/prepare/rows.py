"""Read training rows, one at a time, each with the place it came from, and check their form.

Three forms, named as TRL names them: chat (`messages`), prompt/completion, preference (`chosen`, `rejected`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from wherry.errors import Exit, WherryError
from wherry.nearest import nearest
from wherry.recipe.schema import Data

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages; the assistant's turns from index train_from on are learned."""

    where: str
    messages: list[Message]
    train_from: int = 0
    tools: list[Any] | None = field(default=None)


@dataclass(frozen=True)
class Completion:
    """Plain text, of which the completion is learned."""

    where: str
    prompt: str
    completion: str


Example = Conversation | Completion


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, of which the first is preferred."""

    where: str
    chosen: Example
    rejected: Example


def read_examples(source: str, data: Data, template: str) -> Iterator[Example]:
    """Every row of a JSONL or Parquet file or hub data set as an Example; of preference rows, the chosen answer.

    Raises WherryError (exit 2) naming file and line of the first row that cannot be used.
    """
    for where, row, form in _formed(source, data):
        answer = "completion" if form == "prompt/completion" else "chosen"
        if form == "preference":
            _answered(row, "rejected", where, template)
        yield _chat(row, where, template) if form == "chat" else _answered(row, answer, where, template)


def read_pairs(source: str, data: Data, template: str) -> Iterator[Pair]:
    """Every preference row as a Pair. Raises WherryError as read_examples does, and for rows of another form."""
    for where, row, form in _formed(source, data):
        if form != "preference":
            raise _bad(
                where, f"train.objective: dpo needs preference rows, this one is {form}", "use prompt, chosen, rejected"
            )
        yield Pair(where, *(_answered(row, key, where, template) for key in ("chosen", "rejected")))


def _formed(source: str, data: Data) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(where, row, form) of every row; all of one form."""
    form: str | None = None
    count = 0
    for where, row in _rows(source, data):
        count += 1
        if not isinstance(row, dict):
            raise _bad(where, f"the row is a {type(row).__name__}, not an object", "write one JSON object a line")
        this = _form(row, where)
        if form is not None and this != form:
            raise _bad(where, f"this row is {this}, the ones before are {form}", "keep one form in a file")
        form = this
        yield where, row, form
    if count == 0:
        raise WherryError(f"{source} holds no rows", "data", "give a file with at least one row")


def _rows(source: str, data: Data) -> Iterator[tuple[str, Any]]:
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        yield from _jsonl(path)
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.exists() or source.count("/") != 1:
        raise WherryError(
            f"no data at {source}", "data", "give a .jsonl or .parquet file, or a hub id such as org/name"
        )
    else:
        yield from _hub(source, data)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise WherryError(f"no file {path}", "data", "correct the path (it is relative to where wherry is started)")
    return path


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    size = _existing(path).stat().st_size
    with path.open("rb") as file, tqdm(total=size, unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
        for number, line in enumerate(file, 1):
            bar.update(len(line))
            if not line.strip():
                continue
            where = f"{path}:{number}"
            if number == 1 and line.lstrip()[:1] == b"[":
                raise _bad(where, "the file is one JSON array", "write one JSON object a line (jq -c '.[]')")
            try:
                yield where, json.loads(line)
            except UnicodeDecodeError:
                raise _bad(where, "the line is not UTF-8", "save the file as UTF-8") from None
            except json.JSONDecodeError as error:
                raise _bad(where, f"broken JSON: {error.msg} at column {error.colno}", "correct that line") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(_existing(path))
        number = 0
        with tqdm(total=file.metadata.num_rows, unit="row", desc=path.name, disable=None) as bar:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    bar.update()
                    # A Parquet column holds every row's keys: absent ones come as None.
                    yield f"{path} row {number}", {k: v for k, v in row.items() if v is not None}
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException) as error:
        raise WherryError(
            f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}", str(path), "write or download it again"
        ) from None


def _hub(name: str, data: Data) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        loaded = load_dataset(name, revision=data.revision, split=data.split)
    except (DatasetNotFoundError, RepositoryNotFoundError):
        raise WherryError(
            f"no data set {name} on the hub, or not this revision",
            "data",
            "correct the id; a private one needs HF_TOKEN",
        ) from None
    except (ConnectionError, OSError, ValueError) as error:
        raise WherryError(
            f"{name} cannot be fetched: {str(error).splitlines()[0]}",
            "data",
            "run prepare where the network is (a login node), or give a local file",
            Exit.PREFLIGHT,
        ) from error
    for number, row in enumerate(tqdm(loaded, unit="row", desc=name, disable=None), 1):
        yield f"{name} ({data.split}) row {number}", {k: v for k, v in row.items() if v is not None}


def _bad(where: str, what: str, fix: str) -> WherryError:
    return WherryError(what, where, fix)


def _form(row: dict[str, Any], where: str) -> str:
    if "messages" in row:
        return "chat"
    if "chosen" in row and "rejected" in row:
        if type(row["rejected"]) is not type(row["chosen"]):
            raise _bad(where, "chosen and rejected are of different types", "give both as text, or both as messages")
        return "preference"
    if "prompt" in row and "completion" in row:
        return "prompt/completion"
    if "conversations" in row:
        raise _bad(
            where, "the row is in ShareGPT form (conversations)", "rename to messages, from → role, value → content"
        )
    raise _bad(
        where,
        f"the row has {', '.join(row) or 'no keys'}",
        "use messages, or prompt and completion, or prompt, chosen and rejected",
    )


def _chat(row: dict[str, Any], where: str, template: str) -> Conversation:
    return Conversation(where, _messages(row["messages"], "messages", where, template), 0, row.get("tools"))


def _answered(row: dict[str, Any], key: str, where: str, template: str) -> Example:
    """The row's prompt with the answer that stands under key."""
    prompt, answer, tools = row.get("prompt"), row[key], row.get("tools")
    if isinstance(answer, str):
        if not isinstance(prompt, str):
            raise _bad(where, f"{key} is text, prompt is {type(prompt).__name__}", "give both as text")
        if not answer.strip():
            raise _bad(where, f"{key} is empty", "remove the row or write the answer")
        return Completion(where, prompt, answer)
    answers = _messages(answer, key, where, template)
    if prompt is None:  # TRL's implicit prompt: everything before the last turn
        return Conversation(where, answers, len(answers) - 1, tools)
    before = _messages(prompt, "prompt", where, template)
    return Conversation(where, before + answers, len(before), tools)


def _messages(value: Any, key: str, where: str, template: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _bad(where, f"{key} is not a list of messages", 'write [{"role": "user", "content": "…"}, …]')
    for index, message in enumerate(value):
        at = f"{key}[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _bad(where, f"{at} has no role", 'write {"role": "user", "content": "…"}')
        role, content = message["role"], message.get("content")
        # A role that the template names is its own business; others must be the ones that every template means.
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise _bad(
                where, f"{at} has the role {role!r}, unknown to the chat template", nearest(role, ROLES) + _roles()
            )
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise _bad(where, f"the content of {at} is {type(content).__name__}, not text", "give text")
        if role == "assistant" and not (content or "").strip() and not message.get("tool_calls"):
            raise _bad(where, f"{at} is an empty answer", "remove the row or write the answer")
    return value


def _roles() -> str:
    return f"use {', '.join(ROLES)}"
