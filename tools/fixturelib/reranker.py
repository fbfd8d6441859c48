"""A tiny Qwen3-Reranker in the three forms that people download, with the same weights and so the same scores.

`rerank-qwen3` is the published safetensors: a plain Qwen3ForCausalLM. `rerank-qwen3-gguf` is what llama.cpp's converter makes of it: the
pooling `rank`, the rows of "yes" and "no" as `cls.output.weight` in the place of the output head, and a template named `rerank`.
`rerank-qwen3-old` is the GGUF of older converters: a plain qwen3, with its output head.

reference.json of the first, which holds for all: for each pair the ids of its prompt, and the probability of "yes" beside "no" as the model card computes it: a softmax of
two logits of the last position, of transformers' Qwen3ForCausalLM.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from tokenizers import Tokenizer

from . import checkpoint, gguf_export, models, reference, tokenizer as tok
from .encoders import PAIRS

WORDS = ("yes", "no")
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
BODY = (
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
NAMES = ("rerank-qwen3", "rerank-qwen3-gguf", "rerank-qwen3-old")


def with_words(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with both answers as tokens; no merge makes them."""
    raw = json.loads(tokenizer.to_str())
    # Special tokens before them have to be in the vocabulary, or the reader gives them the ids behind it.
    for word in (*tok.SPECIALS, *WORDS):
        raw["model"]["vocab"][word] = len(raw["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(raw))


def score(model, tokenizer: Tokenizer, query: str, document: str) -> dict:
    """A pair, its ids and its score."""
    body = BODY.format(query=query, document=document)
    ids = [i for part in (BEFORE, body, AFTER) for i in tokenizer.encode(part, add_special_tokens=False).ids]
    assert ids == tokenizer.encode(BEFORE + body + AFTER, add_special_tokens=False).ids
    logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
    yes, _ = torch.softmax(logits[[tokenizer.token_to_id(word) for word in WORDS]], 0).tolist()
    return {"a": query, "b": document, "ids": ids, "score": yes}


@torch.no_grad()
def make(name: str, folder: Path, tokenizer: Tokenizer, seed: int) -> None:
    """One form."""
    tokenizer = with_words(tokenizer)
    raw = {**models.QWEN3, "vocab_size": tok.VOCAB_SIZE + len(WORDS)}
    model = models.build(raw)
    models.randomise(model, raw, seed, "float16")
    tensors = {key: value.to(torch.float16) for key, value in models.state(model).items()}
    checkpoint.fresh(folder)
    if name == "rerank-qwen3":
        checkpoint.write_side_files(folder, raw, "float16", tokenizer)
        checkpoint.write_tensors(folder, tensors)
        model = checkpoint.reload(folder)
        pairs = [score(model, tokenizer, query, document) for query, document in PAIRS]
        reference.dump({"model": name, "pairs": pairs}, folder / "reference.json")
    else:
        judges = name == "rerank-qwen3-gguf"
        writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3")
        template = [{"name": "rerank", "template": BEFORE + BODY + AFTER}] if judges else tok.CHAT_TEMPLATE
        gguf_export.write_metadata(writer, raw, name, tokenizer, template=template)
        if judges:
            writer.add_pooling_type(gguf.PoolingType.RANK)
            writer.add_classifier_output_labels(list(WORDS))
            rows = tensors.pop("lm_head.weight")[[tokenizer.token_to_id(word) for word in WORDS]]
            writer.add_tensor("cls.output.weight", np.ascontiguousarray(rows.numpy()), raw_dtype=Q.F16)
        gguf_export.write_tensors(writer, raw, tensors, (Q.F16, Q.F16, {}))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:26} {size / 1000:7.0f} kB", flush=True)
