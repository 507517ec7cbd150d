"""A real fast tokenizer of a few hundred byte tokens, with the chat templates that make trouble."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Drops the thoughts of an answer, and opens one in the generation prompt, as reasoning models' templates do.
REASONING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% else %}<|bot|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|><think>\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Renders the system message nowhere.
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}Q:{{ m.content }}<|im_end|>"
    "{% elif m.role == 'assistant' %}A:{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
# Ends a turn with ordinary text.
NO_STOP = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|bot|>", "<|reserved_0|>", "<|reserved_1|>"]


def chat_tokenizer(template: str = CHATML, pad: str | None = "<|im_end|>") -> PreTrainedTokenizerFast:
    """256 byte tokens, then SPECIAL. By default pad equals eos, as many published tokenizers have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token=pad,
        chat_template=template,
    )
