"""The tiny byte-level BPE that all tiny models share, its chat template, and reference encodings.

It has the make-up of Qwen's tokenizer (NFC, the same splitting pattern, byte-level BPE, ChatML specials at the
end of the vocabulary), so that it is a real-format file in every respect but size.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from . import text

VOCAB_SIZE = 384
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def build() -> Tokenizer:
    """Trains the tokenizer; the same text gives the same merges every time."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIALS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """The id of one of SPECIALS."""
    return tokenizer.token_to_id(name)


def render(messages: list[dict]) -> str:
    """What CHAT_TEMPLATE yields with a generation prompt, through jinja2 as transformers does it."""
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)


def write(tokenizer: Tokenizer, folder: Path, template_as_file: bool = False) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if asked, the template as chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(s)): {
                "content": s, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True,
            }
            for s in SPECIALS
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    if template_as_file:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    else:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def write_cases(tokenizer: Tokenizer, path: Path) -> None:
    """Encodings of awkward texts (special tokens recognised), their decodings, and two rendered chats."""
    texts = []
    for case in text.TOKENIZER_CASES:
        ids = tokenizer.encode(case, add_special_tokens=False).ids
        texts.append({
            "text": case,
            "ids": ids,
            "decoded": tokenizer.decode(ids, skip_special_tokens=False),
            "decoded_skip_special": tokenizer.decode(ids, skip_special_tokens=True),
        })
    chats = []
    for messages in (
        [{"role": "user", "content": "Is the mark dry?"}],
        [
            {"role": "system", "content": "You keep the log."},
            {"role": "user", "content": "Depth?"},
            {"role": "assistant", "content": "Seven fathoms."},
            {"role": "user", "content": "Größe → ✓"},
        ],
    ):
        rendered = render(messages)
        chats.append({
            "messages": messages,
            "rendered": rendered,
            "ids": tokenizer.encode(rendered, add_special_tokens=False).ids,
        })
    path.write_text(json.dumps({"texts": texts, "chats": chats}, indent=1, ensure_ascii=False) + "\n")
