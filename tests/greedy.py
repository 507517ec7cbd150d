"""The same prompts, answered greedily by vLLM behind the gate and by base + adapter in transformers."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

from wherry.rundir import Run


def served(run: Run, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Token ids that vLLM generates with the run's merged model."""
    from wherry.serve import Server

    with Server(run, which="merged") as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
        key = server.api_key_file.read_text().strip()
        answers = []
        for prompt in prompts:
            body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(body | {"ignore_eos": True, "return_token_ids": True}),
                {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            )
            answers.append(json.loads(connection.getresponse().read())["choices"][0]["token_ids"])
    return answers


def adapted(base: Path, adapter: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Token ids that base + adapter, not merged, generate in transformers, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    return [
        model.generate(input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts
    ]
