"""Every key that a recipe may hold. Few are ours: the rest are the libraries' own argument names, passed through."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class Model(Section):
    name: str
    """A local folder (config.json and safetensors), a GGUF file, or a Hugging Face hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; prepare records the commit."""
    add_tokens: list[str] = Field(default_factory=list)
    """Special tokens for the tokenizer. The embedding grows where it has no rows for them; LoRA trains these rows."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust it by name."""


class Data(Section):
    train: str
    """A JSONL or Parquet file, or a hub id: chat, prompt/completion or preference rows."""
    eval: str | None = None
    """Held-out rows for the loss that train.args.eval_strategy asks for: a file or hub id in the same form."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    split: str = "train"
    """Split of a hub id."""
    chat_template: str | None = None
    """A Jinja file used in place of the tokenizer's own template."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What prepare does with rows longer than train.args.max_length; what it did is counted and printed."""


class Train(Section):
    objective: Literal["sft", "dpo"] = "sft"
    """sft: supervised fine-tuning on the assistant's tokens (preference pairs: on the chosen answer);
    dpo: direct preference optimisation on pairs (arXiv:2305.18290)."""
    tuning: Literal["lora", "qlora", "full"] = "lora"
    """lora: 16-bit base; qlora: base in NF4 with double quantisation (arXiv:2305.14314); full: every weight."""
    sharding: Literal["none", "zero3"] = "none"
    """none: every rank holds the whole model; zero3: weights, gradients and optimizer are split over all ranks."""
    hang_timeout: float = Field(1800, ge=0)
    """Seconds without a step after which every rank writes its stacks and ends (exit 75); 0: never."""
    args: dict[str, Any] = Field(default_factory=dict)
    """trl.SFTConfig or trl.DPOConfig by objective (and so transformers.TrainingArguments)."""
    lora: dict[str, Any] = Field(default_factory=dict)
    """peft.LoraConfig. Defaults: r=16, lora_alpha=32, target_modules=all-linear."""
    quantization: dict[str, Any] = Field(default_factory=dict)
    """transformers.BitsAndBytesConfig, for qlora."""


class Merge(Section):
    base: Literal["bf16", "nf4"] = "bf16"
    """What the adapter is added to: the model's own weights, or (qlora) their values after quantisation to 4 bits."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """dtype of the merged weights. Default: that of the base."""
    max_shard_size: str | None = Field(None, pattern=r"^\d+ *([kKmMgG][iI]?[bB])$")
    """Size of one weights file, as save_pretrained takes it: 5GB. Default: the files of the base."""


class Serve(Section):
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM's engine and API server arguments, with underscores."""
    ready_timeout: float = Field(3600, gt=0)
    """Seconds until a server that is not ready counts as failed. A 70B model may load for half an hour."""
    drain_timeout: float = Field(30, ge=0)
    """Seconds that running requests get to finish after SIGTERM."""


class Eval(Section):
    tasks: list[str] = Field(default_factory=list)
    """inspect-ai task files (path or path@task), run in this order."""
    args: dict[str, Any] = Field(default_factory=dict)
    """inspect_ai.eval: temperature, max_tokens, limit, max_connections, seed, …"""


class Recipe(Section):
    model: Model
    data: Data
    train: Train = Field(default_factory=Train)
    merge: Merge = Field(default_factory=Merge)
    serve: Serve = Field(default_factory=Serve)
    eval: Eval = Field(default_factory=Eval)


# Passed-through names that Wherry itself decides, and why a recipe cannot.
DECIDED_HERE: dict[str, dict[str, str]] = {
    "train.args": {
        "output_dir": "checkpoints live in the run directory: choose it with --run or WHERRY_RUNS",
        "resume_from_checkpoint": "train resumes by itself from the newest complete checkpoint",
        "overwrite_output_dir": "choose another run with --run",
        "assistant_only_loss": "prepare masks everything but the assistant's tokens for any template",
        "completion_only_loss": "prepare masks the prompt of prompt/completion rows",
        "truncation_mode": "prepare makes rows short enough: data.too_long says how",
        "dataset_text_field": "prepare reads messages, prompt/completion or preference rows",
        "dataset_kwargs": "the data is tokenised by prepare",
        "chat_template_path": "use data.chat_template",
        "eos_token": "prepare takes it from the model and writes it into the token contract",
        "pad_token": "prepare takes a reserved token and writes it into the token contract",
        "model_init_kwargs": "use model and train.quantization",
        "trust_remote_code": "use model.trust_remote_code",
        "use_cpu": "a machine without a GPU is detected",
        "deepspeed": "use train.sharding: zero3",
        "fsdp": "use train.sharding: zero3",
        "push_to_hub": "training may run offline: upload the merged folder afterwards",
    },
    "eval.args": {
        "tasks": "use eval.tasks",
        "model": "use --model base or --model merged",
        "model_base_url": "the server of the run is asked",
        "log_dir": "logs are kept in the run directory",
        "display": "it is plain text",
        "fail_on_error": "an item that fails is counted as wrong, aloud",
    },
    "serve.vllm": {
        "model": "use --model base or --model merged",
        "tokenizer": "the run's own tokenizer is served",
        "served_model_name": "it is the run's name",
        "host": "the server listens on loopback",
        "port": "use serve --port, or let a free one be found",
        "api_key": "a key is made for every server and kept in a file that only you can read",
        "uds": "the server is asked on a loopback port",
        "ssl_keyfile": "the server listens on loopback only: put TLS into a proxy before it",
        "ssl_certfile": "the server listens on loopback only: put TLS into a proxy before it",
        "hf_token": "the model is local, and a secret must not stand on a command line",
        "middleware": "the key is checked by Wherry's own, on every path",
        "trust_remote_code": "use model.trust_remote_code",
    },
}
