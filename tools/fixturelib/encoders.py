"""Tiny encoders: BERT with sentence-transformers' files, a BERT cross-encoder, a RoBERTa; and pooled states of a decoder.

reference.json holds `texts` (`text`; its `ids` with special tokens; `first`, the hidden state of the first position; `mean`, that
of all positions in the mean) and, of the cross-encoder, `pairs` (`a`, `b`, `ids`, token `types`, the classifier's `logit`).
pooling_reference.json holds `prompts` of the decoder qwen3: `ids`, `last` and `mean` after the final norm.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from . import checkpoint, reference, text
from .models import _normal

VOCAB_SIZE = 256
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BASE = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 96,
    "model_type": "bert",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

# name → (config.json, dtype on disk)
MODELS: dict[str, tuple[dict, str]] = {
    "bert": ({**BASE, "architectures": ["BertModel"], "position_embedding_type": "absolute"}, "bfloat16"),
    "bert-cross": (
        {**BASE, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "layer_norm_eps": 1e-3},
        "float16",
    ),
    "bert-roberta": (
        {
            **BASE, "architectures": ["RobertaModel"], "model_type": "roberta", "hidden_act": "gelu_new",
            # Positions begin after the padding's, which is its token's id.
            "layer_norm_eps": 1e-5, "pad_token_id": 0, "type_vocab_size": 1,
        },
        "float16",
    ),
}

TEXTS = [
    "A ship",
    "Nobody on the quay can see how much water is left beneath her keel.",
    "The harbour master does not ask how valuable the next crate is. He looks at the line, and the line is dry; "
    "so they load.",
    "déjà vu — 12 crates!",
]
PAIRS = [
    ("who looks at the line?", "The harbour master looks at the line."),
    ("who looks at the line?", "for index in pages"),
    ("A", "how much have we promised? Less than we have, said the purser, and he showed her the book."),
]


def build_tokenizer() -> Tokenizer:
    """A WordPiece vocabulary in BERT's make-up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator([text.CORPUS], trainer)
    ids = {name: tokenizer.token_to_id(name) for name in SPECIALS}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    return tokenizer


def _tensor(seed: int, name: str, shape) -> np.ndarray:
    noise = _normal(seed, name, shape)
    if "LayerNorm" in name:
        return noise * 0.2 + (0.0 if name.endswith("bias") else 1.0)
    if name.endswith("bias"):
        return 0.3 * noise
    if "embeddings" in name:
        return 0.7 * noise
    return 1.5 / np.sqrt(shape[-1]) * noise


@torch.no_grad()
def make(name: str, folder: Path, seed: int) -> None:
    """One encoder, its side files and its numbers."""
    raw, dtype = MODELS[name]
    tokenizer = build_tokenizer()
    for inner in (folder / "1_Pooling").glob("*"):
        inner.unlink()
    if (folder / "1_Pooling").is_dir():
        (folder / "1_Pooling").rmdir()
    checkpoint.fresh(folder)
    config = transformers.AutoConfig.for_model(raw["model_type"]).__class__.from_dict(dict(raw))
    config._attn_implementation = "eager"
    kind = getattr(transformers, raw["architectures"][0])
    model = kind(config).float().eval()
    for parameter, tensor in model.named_parameters():
        value = torch.from_numpy(np.ascontiguousarray(_tensor(seed, parameter, tensor.shape), dtype=np.float32))
        tensor.copy_(value.to(getattr(torch, dtype)).float())
    written = {**raw, "torch_dtype": dtype, "transformers_version": "4.51.0"}
    (folder / "config.json").write_text(json.dumps(dict(sorted(written.items())), indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    side = {"cls_token": "[CLS]", "sep_token": "[SEP]", "tokenizer_class": "BertTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(side, indent=2) + "\n")
    if name == "bert":
        write_modules(folder)
    # A pooler that nobody asks for stays out of the files of models without a head, as some publish them.
    tensors = {k: v.to(getattr(torch, dtype)).contiguous() for k, v in sorted(model.named_parameters())
               if name == "bert-cross" or not k.startswith("pooler.")}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    loaded = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    result = {"model": name, "texts": [one(loaded, tokenizer, t) for t in TEXTS]}
    if name == "bert-cross":
        result["pairs"] = [pair(loaded, tokenizer, a, b) for a, b in PAIRS]
    reference.dump(result, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{name:26} {size / 1000:7.0f} kB", flush=True)


def write_modules(folder: Path) -> None:
    """The files that sentence-transformers keeps beside a model: mean pooling, then normalization."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths))
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2) + "\n")


def _short(values) -> list[float]:
    return [reference.short(x) for x in values]


def one(model, tokenizer: Tokenizer, given: str) -> dict:
    """A text's hidden states, of the first position and in the mean."""
    ids = tokenizer.encode(given).ids
    base = getattr(model, "bert", model)
    hidden = base(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return {"text": given, "ids": ids, "first": _short(hidden[0]), "mean": _short(hidden.double().mean(dim=0))}


def pair(model, tokenizer: Tokenizer, a: str, b: str) -> dict:
    """What the classifier says of two texts."""
    encoded = tokenizer.encode(a, b)
    out = model(input_ids=torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids]))
    return {"a": a, "b": b, "ids": encoded.ids, "types": encoded.type_ids, "logit": reference.short(out.logits[0, 0])}


@torch.no_grad()
def pooled_decoder(source: Path, out: Path) -> None:
    """Pooled states of a decoder's final norm."""
    model = checkpoint.reload(source)
    random = np.random.default_rng(7)
    prompts = []
    for length in (1, 16, 37, 150):
        ids = [int(i) for i in random.integers(0, 380, length)]
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        prompts.append({"ids": ids, "last": _short(hidden[-1]), "mean": _short(hidden.double().mean(dim=0))})
    reference.dump({"model": source.name, "prompts": prompts}, out)
