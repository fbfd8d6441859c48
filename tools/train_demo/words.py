"""The demo model's tokenizer, and chats as token ids with the places of their answers.

Its make-up is Qwen3.5's: NFC, the same splitting (every digit a token), byte-level BPE, specials at the end of the vocabulary.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import pictures
import text_tasks

VOCAB_SIZE = 1024
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>",
]
# Known to the tokenizer but not hidden from answers.
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
CORPUS_CHATS = 12_000
# What people ask that the tasks do not say, so that no common letter pair is missing.
EXTRA = "the and that have for not with you this but his from they say her she will one all would there their what so up out if about who get which go me when make can like time no just him know take people into year your good some could them see other than then now look only come its over think also back after use two how our work first well way even new want because any these give day most us"


def build() -> Tokenizer:
    """Trains the tokenizer; the same text gives the same merges every time."""
    rng = np.random.default_rng(5)
    lines = [EXTRA] * 3 + pictures.READ * 30 + pictures.WHAT * 30 + list(text_tasks.SYSTEM) * 30
    for shape in pictures.SHAPES:
        for colour in pictures.COLOURS:
            for form in [*pictures.COLOUR, *pictures.SHAPE, *pictures.BOTH, *pictures.MANY]:
                lines.append(form.format(s=shape, c=colour, p=pictures.PLURALS[shape]))
            lines += [f"{colour} {shape}", f"A {colour} {shape}.", colour, shape, f"{colour} {pictures.PLURALS[shape]}."]
    lines += ["The number", "What numbers are in the pictures?", "system", "user", "assistant", "tools"] * 40
    for _ in range(CORPUS_CHATS):
        lines += [part for turn in text_tasks.draw(rng)[1] for part in turn]
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIALS])
    tokenizer.add_tokens([AddedToken(s, normalized=False, special=False) for s in MARKS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def of_run(run: Path) -> Tokenizer:
    """The run's tokenizer, made when it is first asked for."""
    file = run / "tokenizer.json"
    if not file.exists():
        build().save(str(file.with_suffix(".new")), pretty=False)
        file.with_suffix(".new").replace(file)
    return Tokenizer.from_file(str(file))


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the template."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    added = {
        str(tokenizer.token_to_id(name)): {
            "content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": name in SPECIALS,
        }
        for name in SPECIALS + MARKS
    }
    config = {
        "add_prefix_space": False, "added_tokens_decoder": added, "bos_token": None, "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 4096, "pad_token": "<|endoftext|>",
        "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())


class Chats:
    """Turns chats into ids; what is constant is encoded once."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.image = tokenizer.token_to_id("<|image_pad|>")

    def ids(self, text: str) -> list[int]:
        if text not in self.known:
            found = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self.known) > 50_000:
                self.known.clear()
            self.known[text] = found
        return self.known[text]

    def chat(self, turns, system: str | None = None, tokens: list[int] = (), after: bool = False):
        """(ids, which of them are answers); `tokens` counts the tokens of each picture of the first question."""
        ids = self.ids(f"<|im_start|>system\n{system}<|im_end|>\n") if system else []
        ids, answer = list(ids), [False] * len(ids)
        for number, (question, *thinking, reply) in enumerate(turns):
            pads = "".join(f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in tokens) if number == 0 else ""
            content = question + pads if after else pads + question
            opening = "<think>\n" if thinking else ""
            prompt = self.ids(f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n{opening}")
            text = f"{thinking[0]}\n</think>\n\n{reply}" if thinking else reply
            said = [*self.ids(text), self.end]
            ids += [*prompt, *said]
            answer += [False] * len(prompt) + [True] * len(said)
            if number + 1 < len(turns):
                ids += self.ids("\n")
                answer.append(False)
        return ids, answer
