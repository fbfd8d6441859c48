"""Tiny encoders as GGUF the way llama.cpp's converter writes them: BERT, a RoBERTa with a classifier, nomic-bert, ModernBERT with a
classifier, EmbeddingGemma with its dense layers. Each file has the WordPiece vocabulary of the fixture `bert`.

What the converter changes: queries, keys and values of nomic-bert are one matrix; the rows of RoBERTa's table before its first position
are left out, and so is BERT's pooler; Gemma's norms have 1 added; beginnings of words are marked in place of continuations. The reference reads the file
back, dequantizes, undoes those changes and runs transformers. reference.json is that of encoders.py.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize
from tokenizers import Tokenizer

from . import encoders, reference
from .checkpoint import fresh
from .encoders import BASE, GEMMA, MODERN, NOMIC, SPECIALS, VOCAB_SIZE
from .gguf_export import GEMMA_LAYER_NAMES, stored

GEMMA_DENSE = [(96, 128, False, "Identity"), (128, 48, False, "Identity")]
# name → (config.json, type of matrices)
MODELS: dict[str, tuple[dict, Q]] = {
    "bert-gguf": ({**BASE, "architectures": ["BertModel"], "layer_norm_eps": 1e-5}, Q.Q8_0),
    "bert-gguf-cross": (
        {
            **BASE, "architectures": ["RobertaForSequenceClassification"], "model_type": "roberta", "id2label": {"0": "LABEL_0"},
            "layer_norm_eps": 1e-5,
        },
        Q.F16,
    ),
    "bert-gguf-nomic": (
        {
            **NOMIC, "architectures": ["NomicBertModel"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "layer_norm_eps": 1e-5,
        },
        Q.Q8_0,
    ),
    "bert-gguf-modern": ({**MODERN, "architectures": ["ModernBertForSequenceClassification"]}, Q.F16),
    # The query scale follows from the width of a head, as files have no other.
    "embeddinggemma-gguf": ({**GEMMA, "query_pre_attn_scalar": GEMMA["head_dim"]}, Q.Q8_0),
}
ARCHITECTURES = {"bert": "bert", "roberta": "bert", "nomic_bert": "nomic-bert", "modernbert": "modern-bert", "gemma3_text": "gemma-embedding"}
POOLING = {
    "bert-gguf": gguf.PoolingType.CLS, "bert-gguf-nomic": gguf.PoolingType.MEAN, "embeddinggemma-gguf": gguf.PoolingType.MEAN,
}

NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.tok_embeddings": "token_embd",
    "embed_tokens": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "norm": "output_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "classifier": "cls.output",
    "head.dense": "cls",
    "head.norm": "cls.norm",
}
LAYER_NAMES = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
NOMIC_NAMES = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
MODERN_NAMES = {
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
}
NAMES_OF = {"nomic_bert": NOMIC_NAMES, "modernbert": MODERN_NAMES, "gemma3_text": GEMMA_LAYER_NAMES}


def gguf_name(raw: dict, name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    for prefix in ("model.", "roberta.", "encoder.", "layers.", "layer."):
        name = name.removeprefix(prefix)
    module, leaf = name.rsplit(".", 1)
    if not name[0].isdigit():
        return f"{NAMES[module]}.{leaf}"
    layer, module = module.split(".", 1)
    return f"blk.{layer}.{NAMES_OF.get(raw['model_type'], LAYER_NAMES)[module]}.{leaf}"


def as_converted(raw: dict, tensors: dict) -> dict:
    """The tensors as the converter changes them, by Hugging Face names."""
    out = {}
    for name, w in tensors.items():
        if "pooler." in name and raw["model_type"] in ("bert", "nomic_bert"):
            continue
        if raw["model_type"] == "nomic_bert" and "_proj" in name and name.split("self_attn.")[-1][0] in "qkv":
            if ".q_proj." not in name:
                continue
            rows = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, w = name.replace("q_proj", "qkv_proj"), torch.cat(rows)
        if raw["model_type"] == "roberta" and "position_embeddings" in name:
            w = w[raw["pad_token_id"] + 1:]
        if raw["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            w = w + 1
        out[name] = w
    return out


def as_published(raw: dict, read: dict, tensors: dict) -> dict:
    """The inverse of `as_converted`: what a file has, in the place of `tensors`."""
    out = dict(tensors)
    for name, w in read.items():
        if ".qkv_proj." in name:
            out.update({name.replace("qkv_proj", f"{part}_proj"): rows for part, rows in zip("qkv", w.chunk(3))})
            continue
        if raw["model_type"] == "roberta" and "position_embeddings" in name:
            w = torch.cat([tensors[name][: raw["pad_token_id"] + 1], w])
        if raw["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            w = w - 1
        out[name] = w
    return out


def write_metadata(writer: gguf.GGUFWriter, raw: dict, name: str) -> None:
    """Hyperparameters."""
    kind = raw["model_type"]
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(raw["max_position_embeddings"] - (raw["pad_token_id"] + 1 if kind == "roberta" else 0))
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    if kind == "gemma3_text":
        writer.add_head_count_kv(raw["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
        writer.add_rope_freq_base(raw["rope_theta"])
        writer.add_rope_freq_base_swa(raw["rope_local_base_freq"])
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in raw["layer_types"]])
        for number, (inputs, outputs, *_) in enumerate(GEMMA_DENSE):
            writer.add_dense_features_dims(f"dense_{2 + number}", inputs, outputs)
    else:
        writer.add_layer_norm_eps(raw.get("layer_norm_eps") or raw["norm_eps"])
        writer.add_causal_attention(False)
    if kind == "nomic_bert":
        writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    if kind == "modernbert":
        writer.add_rope_freq_base(raw["global_rope_theta"])
        writer.add_rope_freq_base_swa(raw["local_rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_sliding_window(raw["local_attention"])
        writer.add_sliding_window_pattern(raw["global_attn_every_n_layers"])
        writer.add_vocab_size(raw["vocab_size"])
    writer.add_pooling_type(POOLING.get(name, gguf.PoolingType.RANK))
    if "id2label" in raw and name not in POOLING:
        writer.add_classifier_output_labels(list(raw["id2label"].values()))


def write_tokenizer(writer: gguf.GGUFWriter, raw: dict, tokenizer: Tokenizer) -> None:
    """WordPiece, with beginnings of words marked."""
    by_id = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(VOCAB_SIZE)]
    kinds = [gguf.TokenType.CONTROL if t in SPECIALS else gguf.TokenType.NORMAL if i in by_id else gguf.TokenType.UNUSED
             for i, t in enumerate(tokens)]
    marked = lambda t: t if t in SPECIALS else t[2:] if t.startswith("##") else "▁" + t  # noqa: E731
    writer.add_token_type_count(raw.get("type_vocab_size", 1))
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list([marked(t) for t in tokens])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(tokenizer.token_to_id("[UNK]"))
    writer.add_sep_token_id(tokenizer.token_to_id("[SEP]"))
    writer.add_pad_token_id(tokenizer.token_to_id("[PAD]"))
    writer.add_mask_token_id(tokenizer.token_to_id("[MASK]"))


def write_tensors(writer: gguf.GGUFWriter, raw: dict, tensors: dict, matrices: Q) -> None:
    """Matrices in the type chosen for them, all else in F32."""
    for name, tensor in tensors.items():
        w = tensor.float().numpy()
        target = gguf_name(raw, name)
        floats = w.ndim == 1 or target.startswith(("token_types", "position_embd", "cls"))
        kind = Q.F32 if floats else matrices
        if target == "cls.output.weight":
            # One score: a vector, as llama.cpp's tools leave it.
            w = w[0]
        writer.add_tensor(target, np.ascontiguousarray(stored(np.ascontiguousarray(w), kind, 0)), raw_dtype=kind)


@torch.no_grad()
def make(name: str, folder: Path, seed: int) -> None:
    """One file with its reference."""
    raw, matrices = MODELS[name]
    tokenizer = Tokenizer.from_file(str(folder.parent / "bert" / "tokenizer.json"))
    config = transformers.AutoConfig.for_model(raw["model_type"]).__class__.from_dict(dict(raw))
    config._attn_implementation = "eager"
    model = getattr(transformers, raw["architectures"][0])(config).float().eval()
    gemma = raw["model_type"] == "gemma3_text"
    tensors = {
        k: torch.from_numpy(np.ascontiguousarray(encoders._tensor(seed, k, v.shape, gemma), dtype=np.float32))
        for k, v in model.named_parameters()
    }
    converted = as_converted(raw, tensors)
    fresh(folder)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, ARCHITECTURES[raw["model_type"]])
    write_metadata(writer, raw, name)
    write_tokenizer(writer, raw, tokenizer)
    write_tensors(writer, raw, converted, matrices)
    dense = [encoders._dense(seed, number, layer, "float16") for number, layer in enumerate(GEMMA_DENSE)] if gemma else []
    for number, (_, layers) in enumerate(dense):
        writer.add_tensor(f"dense_{2 + number}.weight", layers["linear.weight"].numpy(), raw_dtype=Q.F16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    in_file = {t.name: t for t in gguf.GGUFReader(path).tensors if not t.name.startswith("dense_")}
    read = {}
    for key, tensor in converted.items():
        t = in_file.pop(gguf_name(raw, key))
        w = np.array(dequantize(t.data, t.tensor_type), dtype=np.float32).reshape(tensor.shape)
        read[key] = torch.from_numpy(w)
    assert not in_file, in_file
    values = as_published(raw, read, tensors)
    for parameter, tensor in model.named_parameters():
        tensor.copy_(values[parameter])
    result = {"model": name, "texts": [encoders.one(model, tokenizer, t, dense) for t in encoders.TEXTS]}
    if raw["architectures"][0].endswith("ForSequenceClassification"):
        result["pairs"] = [encoders.pair(model, tokenizer, a, b) for a, b in encoders.PAIRS]
    reference.dump(result, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{name:26} {size / 1000:7.0f} kB", flush=True)
