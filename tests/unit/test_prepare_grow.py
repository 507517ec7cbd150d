"""Rows for added tokens: made once, in a folder of their own, and the base stays as it was."""

import hashlib

import pytest
import torch
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from wherry.files import read_json
from wherry.prepare.grow import grow, token_modules
from wherry.safetensors_file import checkpoint


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize(("tied", "shards"), [(True, 1), (False, 1), (False, 4)])
@pytest.mark.parametrize("linked", [True, False])
def test_new_rows_are_the_mean_and_all_else_is_as_it_was(tmp_path, tied, shards, linked):
    base = make_tiny_model(tmp_path / "base", vocab_size=262, tied=tied, shards=shards)
    before, files = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), digests(base)
    folder = base
    if linked:
        folder = tmp_path / "prepare/model"
        folder.parent.mkdir()
        folder.symlink_to(base)
    assert token_modules(checkpoint(folder)) == (["embed_tokens"] if tied else ["embed_tokens", "lm_head"])
    grow(folder, 263)
    if linked:
        assert digests(base) == files
    whole = checkpoint(folder)  # a sound index and sound files
    assert whole.sharded == (shards > 1)
    if whole.sharded:
        assert read_json(folder / "model.safetensors.index.json")["metadata"]["total_size"] == whole.total_size
    after = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert after.config.vocab_size == 320  # the next multiple of 64
    wide = {"model.embed_tokens.weight", "lm_head.weight"}
    for name, tensor in before.state_dict().items():
        now = after.state_dict()[name]
        assert torch.equal(now[: len(tensor)], tensor), name
        assert len(now) == (320 if name in wide else len(tensor))
        if name in wide:
            mean = tensor.float().mean(dim=0).to(torch.bfloat16)
            assert torch.equal(now[262:], mean.expand(58, -1))
