"""TRL's trainers, one an objective, on data that prepare has tokenised."""

from __future__ import annotations

from typing import Any

from wherry.rundir import Run
from wherry.train import checkpoints, model


def trainer(run: Run, network: Any, args: Any, adapter: Any, callbacks: list[Any]) -> Any:
    """The trainer of train.objective; its checkpoints carry markers. Raises what TRL raises for values it refuses."""
    from transformers import AutoTokenizer

    objective = run.recipe.train.objective
    more = {"ref_model": model.load_reference(run)} if objective == "dpo" and adapter is None else {}
    return checkpoints.with_markers(trainer_class(objective))(
        model=network,
        args=args,
        train_dataset=model.dataset(run, "train"),
        eval_dataset=model.dataset(run, "eval") if run.recipe.data.eval else None,
        processing_class=AutoTokenizer.from_pretrained(run.dir("prepare") / "tokenizer"),
        peft_config=adapter,
        callbacks=callbacks,
        **more,
    )


def trainer_class(objective: str) -> Any:
    """TRL's trainer for rows of token ids."""
    if objective == "sft":
        from trl import SFTTrainer

        return SFTTrainer
    from trl import DPOTrainer

    class Prepared(DPOTrainer):
        """Takes pairs of token ids. DPOTrainer would render and tokenise text, on every rank."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    Prepared.__name__ = "DPOTrainer"
    return Prepared
