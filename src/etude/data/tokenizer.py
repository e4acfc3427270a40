"""Byte-level BPE for code with the special tokens of the chat format, saved as Hugging Face files.

The vocabulary is small on purpose: on a laptop the output head is a large share of a tiny model's arithmetic.
Digits stand alone, so that constants are learnt digit by digit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.base.errors import CheckpointError

PAD, EOS = "<|pad|>", "<|endoftext|>"
SYSTEM, USER, ASSISTANT, TOOL, END = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"
THINK, END_THINK, CALL = "<|think|>", "<|/think|>", "<|call|>"
FILE, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = "<|file|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
RESERVED = ("<|reserved_0|>", "<|reserved_1|>")

SPECIAL_TOKENS = (
    *(PAD, EOS, SYSTEM, USER, ASSISTANT, TOOL, END, THINK, END_THINK, CALL),
    *(FILE, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE),
    *RESERVED,
)

# Words with an optional leading blank or underscore, single digits, newlines with the indentation that follows, other marks.
_SPLIT = r"\n[ ]*|[ _]?[A-Za-z]+|[0-9]|[ ]?[^\sA-Za-z0-9_]+|[ ]+(?=[^ ])|_|\s+"

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>"
    "{% if m.thinking %}<|think|>{{ m.thinking }}<|/think|>{% endif %}{{ m.content }}"
    "{% for c in m.calls %}<|call|>{{ c.name }}{% for v in c.arguments.values() %}\n{{ v }}{% endfor %}{% endfor %}"
    "<|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a BPE of ``vocab_size`` entries (256 bytes and the special tokens included)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"checkpoint {directory}: no tokenizer.json there")
    return Tokenizer.from_file(str(path))


def token_id(tokenizer: Tokenizer, name: str) -> int:
    """Id of a special token. Raises CheckpointError when the vocabulary lacks it."""
    found = tokenizer.token_to_id(name)
    if found is None:
        raise CheckpointError(f"tokenizer: no special token {name}; the chat format needs it")
    return int(found)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and the tokenizer_config.json that ``transformers`` reads, chat template included."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
