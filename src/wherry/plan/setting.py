"""What training will do, as far as memory and time depend on it: the recipe, and what TRL makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wherry.errors import WherryError
from wherry.plan.shapes import Shape
from wherry.recipe import Recipe

# Bytes a trainable parameter of an optimizer's states, where they follow the parameter's size: AdamW keeps two.
EIGHT_BIT = ("8bit",)
STATELESS = ("sgd",)
ONE_STATE = ("lion", "adagrad", "rmsprop")


@dataclass(frozen=True)
class Setting:
    """One rank's step. Sizes are in bytes, lengths in tokens.

    loss: "chunked" (TRL's default: 256 tokens at a time), "whole" (all logits at once, loss_type nll) or "fused"
    (Liger). fused: Liger's RMSNorm and SwiGLU as well. recomputed: how many layers, the first ones, recompute their
    activations. padded: attention gets a mask. paired: preference pairs, two rows for each. upcast: PEFT's
    prepare_model_for_kbit_training was called, which Wherry does not do.
    """

    tuning: str
    sharded: bool
    ranks: int
    sequence: int
    batch: int
    recomputed: int
    adapter_size: int = 2
    autocast: bool = True
    fused: bool = False
    loss: str = "chunked"
    upcast: bool = False
    paired: bool = False
    padded: bool = False
    dropout: bool = False
    products_kept: bool = False
    optimizer: str = "adamw_torch_fused"
    lora_rank: int = 16
    targets: Any = "all-linear"
    accumulation: int = 1

    @property
    def tokens(self) -> int:
        """Of a rank in one forward pass."""
        return self.sequence * self.batch * (2 if self.paired else 1)

    @property
    def parts(self) -> int:
        """Ranks that weights and optimizer are split over."""
        return self.ranks if self.sharded else 1

    @property
    def stream(self) -> int:
        """Bytes a number of the residual stream: that of the embedding's output."""
        return 4 if self.upcast or (self.tuning == "full" and not self.sharded) else 2

    @property
    def trainable_size(self) -> int:
        """Bytes of a trainable parameter, and of its gradient."""
        if self.sharded:
            return 2
        return 4 if self.tuning == "full" else self.adapter_size

    @property
    def state_size(self) -> float:
        """Bytes of optimizer states a trainable parameter; under ZeRO-3 with its float32 master copy."""
        each = 4 if self.sharded else self.trainable_size
        if any(word in self.optimizer for word in EIGHT_BIT):
            states: float = 2 * (1 + 4 / 256)  # a byte, and a float32 scale for 256 of them
        elif any(word in self.optimizer for word in STATELESS):
            states = 0
        else:
            states = each * (1 if any(word in self.optimizer for word in ONE_STATE) else 2)
        return states + (4 if self.sharded else 0)

    def trainable(self, shape: Shape) -> int:
        if self.tuning == "full":
            return shape.parameters
        return shape.layers * shape.adapter(self.lora_rank, self.targets)

    def __str__(self) -> str:
        whole = "" if self.ranks == 1 else ", whole on every GPU"
        return self.tuning + (" + ZeRO-3" if self.sharded else whole)


def of_recipe(recipe: Recipe, shape: Shape, ranks: int, max_length: int) -> Setting:
    """The setting of a recipe; max_length: tokens of the longest row, where the recipe does not say."""
    train, args = recipe.train, recipe.train.args
    sharded = train.sharding == "zero3"
    fused = bool(args.get("use_liger_kernel"))
    batch = _count(args, "per_device_train_batch_size", 8)
    length = _count(args, "max_length", max_length)
    # TRL lays a batch without padding end to end; SDPA then needs a mask of all its tokens to keep rows apart.
    flat = bool(args.get("padding_free")) or (
        bool(args.get("packing")) and str(args.get("packing_strategy", "bfd")).startswith("bfd")
    )
    if flat:
        batch, length = 1, batch * length
    paired = train.objective == "dpo"
    loss = "whole" if paired else {"nll": "whole", "dft": "whole"}.get(str(args.get("loss_type")), "chunked")
    return Setting(
        tuning=train.tuning,
        sharded=sharded,
        ranks=ranks,
        sequence=length,
        batch=batch,
        recomputed=shape.layers if args.get("gradient_checkpointing", True) else 0,
        # TRL keeps a quantised model's adapter in bfloat16, and one under ZeRO-3; PEFT makes any other float32.
        adapter_size=2 if sharded or train.tuning == "qlora" else 4,
        autocast=not sharded,
        fused=fused,
        loss="fused" if fused else loss,
        paired=paired,
        padded=flat or ((paired or batch > 1) and not args.get("packing")),
        dropout=bool(train.lora.get("lora_dropout")),
        optimizer=str(args.get("optim", "adamw_torch_fused")),
        lora_rank=int(train.lora.get("r", 16)),
        targets=train.lora.get("target_modules", "all-linear"),
        accumulation=_count(args, "gradient_accumulation_steps", 1),
    )


def _count(args: dict[str, Any], name: str, default: int) -> int:
    """A number above zero. Raises WherryError (exit 2) for anything else."""
    value = default if args.get(name) is None else args[name]
    if isinstance(value, int) and value > 0:
        return value
    raise WherryError(f"train.args.{name} is {value!r}", f"train.args.{name}", "give a whole number above 0")
