"""The plan's bytes against the resident memory of a process that trains on the CPU."""

import json
import os
import subprocess
import sys

import pytest

from wherry.plan import memory
from wherry.plan.setting import Setting
from wherry.plan.shapes import Shape

SHAPE = Shape(
    vocab=8192, hidden=1024, inner=3072, layers=4, heads=16, kv_heads=4, head=64, tied=False, bias=False, context=4096
)
TOKENS = 1024
SCRIPT = """
import json, sys, torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

config = LlamaConfig(**json.loads(sys.argv[1]))
tokens = int(sys.argv[2])
LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64))(
    input_ids=torch.zeros(1, 64, dtype=torch.long)).logits.sum().backward()  # whatever the first use allocates
seen = [resident()]
with torch.device("meta"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
model.to_empty(device="cpu")
model.model.rotary_emb = type(model.model.rotary_emb)(config)
for p in model.parameters():
    p.data.fill_(0.01)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
                       autocast_adapter_dtype=False).train()
seen.append(resident())
embedded = model.get_input_embeddings()(torch.zeros(1, tokens, dtype=torch.long)).requires_grad_(True)
kept = model.base_model.model.model(inputs_embeds=embedded, use_cache=False)
seen.append(resident())
print(json.dumps(seen))
"""


def test_weights_and_kept_activations():
    sizes = {"vocab_size": SHAPE.vocab, "hidden_size": SHAPE.hidden, "intermediate_size": SHAPE.inner}
    sizes |= {"num_hidden_layers": SHAPE.layers, "num_attention_heads": SHAPE.heads}
    sizes |= {"num_key_value_heads": SHAPE.kv_heads, "tie_word_embeddings": False}
    command = [sys.executable, "-c", SCRIPT, json.dumps(sizes), str(TOKENS)]
    # glibc would keep what was freed for later, and the process would look larger than what it holds.
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | returned)
    assert done.returncode == 0, done.stderr
    before, loaded, forward = json.loads(done.stdout)
    setting = Setting("lora", False, 1, TOKENS, 1, 0, autocast=False, loss="whole")
    parts = memory.static(SHAPE, setting)
    weights = parts["weights"].size - memory.WORKSPACES + parts["adapter"].size
    assert loaded - before == pytest.approx(weights, rel=0.1)
    kept = memory.kept(SHAPE, setting, SHAPE.layers).size
    kept += TOKENS * SHAPE.hidden * (2 + 4 + 2)  # the embedding's output; the last norm's input and output
    assert forward - loaded == pytest.approx(kept, rel=0.1)
