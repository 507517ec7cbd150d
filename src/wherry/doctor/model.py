"""Checks of model and data as files: nothing is loaded, headers and small JSON files are read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from wherry.doctor.check import Verdict, check, fail, passed, refused, skip
from wherry.doctor.context import Context
from wherry.errors import WherryError
from wherry.files import read_json
from wherry.plan.cache import tokens as served_tokens
from wherry.plan.made import find_shape
from wherry.prepare import tokens
from wherry.rundir import Run
from wherry.safetensors_file import checkpoint

NO_RECIPE = "no recipe or run is given"
ROWS = 1000  # of a file that has not been prepared yet: enough to see what kind of file it is


def folder_of(run: Run) -> Path | None:
    """The model's folder: prepared, or named by the recipe; None where it is still to be fetched."""
    for folder in (run.dir("prepare") / "model", Path(run.recipe.model.name)):
        if folder.is_dir():
            return folder
    return None


@check("recipe.staged", "once")
def staged(context: Context) -> Verdict:
    run = context.run
    if run is None:
        return skip(NO_RECIPE)
    if run.is_complete("prepare"):
        return passed("prepare is complete: no network is needed any more")
    where = f"run {run.name!r} is not prepared"
    if context.in_job:
        return fail(f"{where}, and a job may have no network", f"on the login node: wherry prepare --run {run.name}")
    return skip(f"{where} yet")


@check("model.shards", "once")
def shards(context: Context) -> Verdict:
    if context.run is None:
        return skip(NO_RECIPE)
    folder = folder_of(context.run)
    if folder is None:
        link = context.run.dir("prepare") / "model"
        if link.is_symlink():
            return fail(f"the model's folder is gone: {link.readlink()}", "put it back, or prepare another run")
        return skip(f"{context.run.recipe.model.name} is not here yet: prepare fetches it")
    whole = checkpoint(folder)
    return passed(f"{len(whole.files)} files, {len(whole.tensors)} tensors, {whole.total_size / 1e9:.2f} GB, all whole")


@check("model.config", "once")
def config(context: Context) -> Verdict:
    folder = _folder(context)
    if isinstance(folder, Verdict):
        return folder
    made = read_json(folder / "config.json")
    rows = tokens.embedding_rows(folder)
    vocab = made.get("vocab_size") or made.get("text_config", {}).get("vocab_size")
    if vocab != rows:
        return fail(
            f"config.json says vocab_size={vocab}, the embedding has {rows} rows",
            f"set vocab_size to {rows} in config.json: vLLM and transformers trust it",
        )
    shape, _ = find_shape(context.run) if context.run else (None, "")
    return passed(f"{rows} rows, {shape.layers if shape else '?'} layers, as config.json says")


@check("model.vocabulary", "once")
def vocabulary(context: Context) -> Verdict:
    folder = _folder(context)
    if isinstance(folder, Verdict):
        return folder
    largest = largest_id(_tokenizer(context, folder))
    if largest is None:
        return skip("no tokenizer.json here")
    rows = tokens.embedding_rows(folder)
    if largest >= rows:
        return fail(
            f"the tokenizer's largest id is {largest}, the embedding has {rows} rows: a device-side assert",
            "use the tokenizer that belongs to the model; never resize the embedding down to the tokenizer",
        )
    return passed(f"largest id {largest}, {rows} rows")


def largest_id(folder: Path) -> int | None:
    """Over vocabulary and added tokens: tokenizer.vocab_size would leave the latter out."""
    if not (folder / "tokenizer.json").is_file():
        return None
    made = read_json(folder / "tokenizer.json")
    vocab = made.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    return max([*ids, *(int(token["id"]) for token in made.get("added_tokens", []))], default=None)


@check("model.pad", "once")
def pad(context: Context) -> Verdict:
    folder = _folder(context)
    if isinstance(folder, Verdict):
        return folder
    run = context.run
    assert run is not None
    if agreed := run.manifest().get("contract"):
        try:
            tokens.check_contract(agreed)
        except WherryError as error:
            return refused(error)
        return passed(f"pad {agreed['pad_token_id']}, stop tokens {agreed['eos_token_ids']}")
    made = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    eos, own = (_content(made.get(name)) for name in ("eos_token", "pad_token"))
    if eos is None:
        return fail("the tokenizer has no eos token", "set eos_token in tokenizer_config.json: answers would never end")
    if own is None or own == eos:
        return passed(f"pad is {own or 'not set'}, eos is {eos}: prepare will take a reserved token as pad")
    return passed(f"pad {own}, eos {eos}")


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


@check("model.contract", "once")
def contract(context: Context) -> Verdict:
    run = context.run
    if run is None:
        return skip(NO_RECIPE)
    agreed = run.manifest().get("contract")
    if not agreed:
        return skip("prepare has not written it yet")
    if isinstance(sound := _folder(context), Verdict):
        return sound
    if not (run.dir("prepare") / "model").is_dir():
        return skip("the prepared model is not there (model.shards)")
    folder = run.dir("prepare")
    now: dict[str, Any] = {
        "embedding_rows": tokens.embedding_rows(folder / "model"),
        "context_length": tokens.context_length(folder / "model"),
    }
    template = folder / "tokenizer/chat_template.jinja"
    if template.is_file():
        now["chat_template_sha256"] = hashlib.sha256(template.read_text(encoding="utf-8").encode()).hexdigest()
    for key, value in now.items():
        if agreed.get(key) != value:
            return fail(
                f"{key} was {agreed.get(key)!r} in prepare and is {value!r} now",
                f"remove {folder} and prepare again",
            )
    return passed("model, tokenizer and template are those that prepare saw")


@check("model.template", "once")
def template(context: Context) -> Verdict:
    folder = _folder(context)
    if isinstance(folder, Verdict):
        return folder
    run = context.run
    assert run is not None
    given = run.recipe.data.chat_template
    if given and not Path(given).is_file():
        return fail(f"no file {given}", "correct data.chat_template")
    own = _tokenizer(context, folder)
    made = read_json(own / "tokenizer_config.json") if (own / "tokenizer_config.json").is_file() else {}
    if given or made.get("chat_template") or (own / "chat_template.jinja").is_file():
        return passed(given or "the tokenizer's own")
    return fail("the tokenizer has no chat template, and chat rows need one", "name one: data.chat_template=FILE.jinja")


@check("train.context", "once")
def train_context(context: Context) -> Verdict:
    return _context(context, "train.args.max_length", lambda run: run.recipe.train.args.get("max_length"))


@check("serve.context", "once")
def serve_context(context: Context) -> Verdict:
    return _context(context, "serve.vllm.max_model_len", lambda run: _served(run, context))


def _served(run: Run, context: Context) -> int | None:
    """Tokens that the server is asked for, or None."""
    given = run.recipe.serve.vllm.get("max_model_len")
    return served_tokens(given, context.plan.shape.context) if given is not None and context.plan else None


def _context(context: Context, key: str, value: Any) -> Verdict:
    """Whether a mode asks for more tokens than the model has positions for."""
    if context.run is None or context.plan is None:
        return skip(NO_RECIPE if context.run is None else "the model's shape is not known yet")
    asked, own = value(context.run), context.plan.shape.context
    if asked is not None and int(asked) > own:
        return fail(f"{key}={asked}, the model was made for {own} positions", f"{key}={own} or less")
    return passed(f"{asked or 'the model’s own'} of {own}")


@check("eval.context", "once")
def eval_context(context: Context) -> Verdict:
    run = context.run
    if run is None or context.plan is None:
        return skip(NO_RECIPE if run is None else "the model's shape is not known yet")
    room = _served(run, context) or context.plan.shape.context
    answer = run.recipe.eval.args.get("max_tokens")
    if not run.recipe.eval.tasks:
        return skip("no tasks")
    if answer is not None and int(answer) >= room:
        return fail(
            f"eval.args.max_tokens={answer} leaves nothing of {room} tokens for a prompt: every item would be cut",
            "raise serve.vllm.max_model_len, or lower eval.args.max_tokens",
        )
    if answer is not None and int(answer) > room // 2:
        return Verdict(
            "warn",
            f"{answer} of {room} tokens are kept for answers: longer prompts than {room - int(answer)} do not fit",
            "raise serve.vllm.max_model_len; what does not fit counts as wrong, aloud",
        )
    return passed(f"{room} tokens, of which {answer if answer is not None else 'the rest'} for an answer")


@check("data.rows", "once")
def rows(context: Context) -> Verdict:
    run = context.run
    if run is None:
        return skip(NO_RECIPE)
    if run.is_complete("prepare"):
        arrow = run.dir("prepare") / "train.arrow"
        if not arrow.is_file() or not arrow.stat().st_size:
            return fail(f"{arrow} is not there", f"remove {run.dir('prepare')} and prepare again")
        return passed(f"{run.manifest()['modes'].get('prepare', {}).get('data', {}).get('rows', '?')} rows, tokenised")
    path = Path(run.recipe.data.train)
    if not path.suffix:
        return skip(f"{path} is a hub id: prepare fetches it")
    if not path.is_file():
        return fail(f"no file {path}", "correct data.train")
    if path.suffix not in (".jsonl", ".json"):
        return passed(f"{path}, {path.stat().st_size / 1e6:.1f} MB")
    return _jsonl(path)


def _jsonl(path: Path) -> Verdict:
    count = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if number > ROWS:
                break
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                return fail(f"{path}:{number} is not JSON: {error.msg}", "correct or remove that line")
            if not isinstance(row, dict) or not ({"messages", "prompt", "chosen"} & set(row)):
                return fail(
                    f"{path}:{number} has neither messages, prompt nor chosen",
                    "chat, prompt/completion or preference rows (docs/recipe.md)",
                )
            count += 1
    if not count:
        return fail(f"{path} has no rows", "correct data.train")
    return passed(f"{count}{'+' if count == ROWS else ''} rows readable")


def _folder(context: Context) -> Path | Verdict:
    """The model's folder, if its files are sound: what is wrong with them is said once, by model.shards."""
    if context.run is None:
        return skip(NO_RECIPE)
    folder = folder_of(context.run)
    if folder is None:
        return skip(f"{context.run.recipe.model.name} is not here yet: prepare fetches it")
    try:
        checkpoint(folder)
    except WherryError:
        return skip("the model's files are not sound (model.shards)")
    return folder


def _tokenizer(context: Context, folder: Path) -> Path:
    """The run's own tokenizer where there is one, else the model's."""
    assert context.run is not None
    own = context.run.dir("prepare") / "tokenizer"
    return own if own.is_dir() else folder
