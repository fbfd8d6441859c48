"""Tiny encoders: BERT with sentence-transformers' files, a BERT cross-encoder, a RoBERTa, ModernBERT, nomic-bert in both of its
forms, EmbeddingGemma with and without dense layers; and pooled states of a decoder.

reference.json holds `texts` (`text`; its `ids` with special tokens; `first`, the hidden state of the first position; `mean`, that
of all positions in the mean; or `dense`, what dense layers make of the mean) and, of the cross-encoder, `pairs` (`a`, `b`, `ids`, token `types`, the classifier's `logit`).
pooling_reference.json holds `prompts` of the decoder qwen3: `ids`, `last` and `mean` after the final norm.
"""

import json
import shutil
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

# Sizes that are no powers of two, and windows that are shorter than the texts.
MODERN = {
    "architectures": ["ModernBertModel"],
    "classifier_pooling": "mean",
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 48,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 80,
    "local_attention": 10,
    "local_rope_theta": 100.0,
    "max_position_embeddings": 96,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-5,
    "num_attention_heads": 3,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "vocab_size": VOCAB_SIZE,
}
# Keys of the code that published checkpoints bring along. It makes the feed-forward part a multiple of 256 wide.
NOMIC_ORIGINAL = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "causal": False,
    "layer_norm_epsilon": 1e-4,
    "max_trained_positions": 96,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 48,
    "n_head": 3,
    "n_inner": 200,
    "n_layer": 2,
    "n_positions": 192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 70,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": 2,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": VOCAB_SIZE - 3,
}
NOMIC = {
    "architectures": ["NomicBertForSequenceClassification"],
    "hidden_act": "silu",
    "hidden_size": 48,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 80,
    "layer_norm_eps": 1e-4,
    "max_position_embeddings": 96,
    "model_type": "nomic_bert",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_theta": 70.0, "rope_type": "default"},
    "type_vocab_size": 2,
    "vocab_size": VOCAB_SIZE,
}
# A Gemma 3 of which every position sees those before and after it. The window is odd.
GEMMA = {
    "architectures": ["Gemma3TextModel"],
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 96,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 96,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 30.0,
    "rope_theta": 5000.0,
    "sliding_window": 9,
    "use_bidirectional_attention": True,
    "vocab_size": VOCAB_SIZE,
}
# Inputs, outputs, bias, activation of dense layers.
DENSE = [(96, 112, True, "Tanh"), (112, 48, False, "Identity")]
# What transformers calls the keys of the original form.
NOMIC_KEYS = {
    "hidden_size": "n_embd", "layer_norm_eps": "layer_norm_epsilon", "max_position_embeddings": "max_trained_positions",
    "num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "type_vocab_size": "type_vocab_size",
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
    "bert-modern": (MODERN, "float16"),
    "bert-modern-mean": ({**MODERN, "architectures": ["ModernBertForSequenceClassification"], "local_attention": 7}, "bfloat16"),
    # The form of transformers 5, with every bias, and with two kinds of layers in an order of its own.
    "bert-modern-biased": (
        {
            **{k: v for k, v in MODERN.items() if not k.startswith(("global_", "local_rope"))},
            "architectures": ["ModernBertForSequenceClassification"], "attention_bias": True, "classifier_bias": True,
            "classifier_activation": "silu", "classifier_pooling": "cls", "hidden_activation": "gelu_pytorch_tanh", "mlp_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "norm_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 30.0, "rope_type": "default"},
            },
        },
        "float16",
    ),
    "bert-nomic": (NOMIC_ORIGINAL, "float16"),
    "bert-nomic-cross": (NOMIC, "bfloat16"),
    "embeddinggemma": (GEMMA, "bfloat16"),
    "embeddinggemma-bare": ({**GEMMA, "sliding_window": 12, "num_attention_heads": 2, "num_key_value_heads": 2}, "float16"),
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


def _tensor(seed: int, name: str, shape, zero_centred: bool = False) -> np.ndarray:
    noise = _normal(seed, name, shape)
    if "norm" in name.lower():
        return noise * 0.2 + (0.0 if name.endswith("bias") or zero_centred else 1.0)
    if name.endswith("bias"):
        return 0.3 * noise
    if "embeddings" in name:
        return 0.7 * noise
    return 1.5 / np.sqrt(shape[-1]) * noise


@torch.no_grad()
def make(name: str, folder: Path, seed: int) -> None:
    """One encoder, its side files and its numbers."""
    raw, dtype = MODELS[name]
    # The trainer does not give the same vocabulary twice: the later fixtures take the one of `bert` as it is.
    shared = folder.parent / "bert" / "tokenizer.json"
    own = name in ("bert", "bert-cross", "bert-roberta")
    tokenizer = build_tokenizer() if own else Tokenizer.from_file(str(shared))
    for module in ("1_Pooling", "2_Dense", "3_Dense"):
        shutil.rmtree(folder / module, ignore_errors=True)
    checkpoint.fresh(folder)
    kind = transformers.AutoConfig.for_model(raw["model_type"]).__class__
    config = kind.from_dict(of_original(raw) if "n_embd" in raw else dict(raw))
    config._attn_implementation = "eager"
    kind = getattr(transformers, raw["architectures"][0])
    model = kind(config).float().eval()
    for parameter, tensor in model.named_parameters():
        value = torch.from_numpy(np.ascontiguousarray(_tensor(seed, parameter, tensor.shape, raw["model_type"] == "gemma3_text"), dtype=np.float32))
        tensor.copy_(value.to(getattr(torch, dtype)).float())
    written = {**raw, "torch_dtype": dtype, "transformers_version": "4.51.0"}
    (folder / "config.json").write_text(json.dumps(dict(sorted(written.items())), indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    side = {"cls_token": "[CLS]", "sep_token": "[SEP]", "tokenizer_class": "BertTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(side, indent=2) + "\n")
    dense = [] if name != "embeddinggemma" else [_dense(seed, number, layer, dtype) for number, layer in enumerate(DENSE)]
    if name in ("bert", "bert-modern", "bert-nomic", "embeddinggemma"):
        write_modules(folder, raw.get("hidden_size", raw.get("n_embd")), name == "bert-modern", dense)
    # A pooler that nobody asks for stays out of the files of models without a head, as some publish them.
    scores = raw["architectures"][0].endswith("ForSequenceClassification")
    tensors = {k: v.to(getattr(torch, dtype)).contiguous() for k, v in sorted(model.named_parameters())
               if scores or not k.startswith("pooler.")}
    if "n_embd" in raw:
        tensors = with_original_names(tensors)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    # transformers has other names for the keys of the original form.
    given = {"config": config} if "n_embd" in raw else {}
    loaded, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **given
    )
    loaded.eval()
    assert all(key.startswith("pooler.") for key in info["missing_keys"]) and not info["unexpected_keys"], info
    result = {"model": name, "texts": [one(loaded, tokenizer, t, dense) for t in TEXTS]}
    if scores:
        result["pairs"] = [pair(loaded, tokenizer, a, b) for a, b in PAIRS]
    reference.dump(result, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{name:26} {size / 1000:7.0f} kB", flush=True)


def of_original(raw: dict) -> dict:
    """What transformers calls the original form of nomic-bert's configuration."""
    renamed = {new: raw[old] for new, old in NOMIC_KEYS.items()}
    up = lambda size, step: -(-size // step) * step  # noqa: E731
    rope = {"rope_theta": float(raw["rotary_emb_base"]), "rope_type": "default"}
    return {
        **renamed, "hidden_act": "silu", "intermediate_size": up(raw["n_inner"], 256), "rope_parameters": rope,
        "vocab_size": up(raw["vocab_size"], raw["pad_vocab_size_multiple"]),
    }


def with_original_names(tensors: dict) -> dict:
    """The tensors of a nomic-bert under the names of published checkpoints, queries, keys and values in one."""
    names = {
        "embeddings.LayerNorm": "emb_ln", "self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc11", "mlp.gate_proj": "mlp.fc12",
        "mlp.down_proj": "mlp.fc2", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2", "layers.": "encoder.layers.",
    }
    out = {}
    for name, tensor in tensors.items():
        if ".self_attn.q_proj." in name:
            rows = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, tensor = name.replace("self_attn.q_proj", "attn.Wqkv"), torch.cat(rows)
        elif ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            continue
        for new, old in names.items():
            name = name.replace(new, old)
        out[name] = tensor.contiguous()
    return out


def _dense(seed: int, number: int, layer: tuple, dtype: str) -> tuple[dict, dict]:
    """A dense layer: its configuration, and its tensors as they are stored."""
    inputs, outputs, bias, activation = layer
    shapes = {"linear.weight": (outputs, inputs), **({"linear.bias": (outputs,)} if bias else {})}
    tensors = {name: torch.from_numpy(_tensor(seed, f"dense.{number}.{name}", shape)) for name, shape in shapes.items()}
    modules = {"Tanh": "activation", "Identity": "linear"}
    config = {
        "activation_function": f"torch.nn.modules.{modules[activation]}.{activation}", "bias": bias, "in_features": inputs,
        "out_features": outputs,
    }
    return config, {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in tensors.items()}


def _through_dense(x: torch.Tensor, dense: list) -> torch.Tensor:
    """What dense layers make of a pooled state."""
    for config, tensors in dense:
        values = {name: tensor.double() for name, tensor in tensors.items()}
        x = values["linear.weight"] @ x + values.get("linear.bias", 0.0)
        x = torch.tanh(x) if config["activation_function"].endswith("Tanh") else x
    return x


def write_modules(folder: Path, width: int, cls: bool, dense: list) -> None:
    """The files that sentence-transformers keeps beside a model: pooling, then dense layers, then normalization."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    paths = [f"{number}_{kind}" if number else "" for number, kind in enumerate(kinds)]
    for number, (config, tensors) in enumerate(dense):
        inner = folder / paths[2 + number]
        inner.mkdir(exist_ok=True)
        (inner / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, str(inner / "model.safetensors"), metadata={"format": "pt"})
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths))
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": width, "pooling_mode_cls_token": cls, "pooling_mode_mean_tokens": not cls}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2) + "\n")


def _short(values) -> list[float]:
    return [reference.short(x) for x in values]


def one(model, tokenizer: Tokenizer, given: str, dense: list) -> dict:
    """A text's hidden states, of the first position and in the mean; or what dense layers make of the latter."""
    ids = tokenizer.encode(given).ids
    base = next((getattr(model, part) for part in ("bert", "roberta", "nomic_bert", "model") if hasattr(model, part)), model)
    hidden = base(input_ids=torch.tensor([ids])).last_hidden_state[0]
    mean = hidden.double().mean(dim=0)
    if dense:
        return {"text": given, "ids": ids, "dense": _short(_through_dense(mean, dense))}
    return {"text": given, "ids": ids, "first": _short(hidden[0]), "mean": _short(mean)}


def pair(model, tokenizer: Tokenizer, a: str, b: str) -> dict:
    """What the classifier says of two texts."""
    encoded = tokenizer.encode(a, b)
    types = {} if model.config.model_type == "modernbert" else {"token_type_ids": torch.tensor([encoded.type_ids])}
    out = model(input_ids=torch.tensor([encoded.ids]), **types)
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
