"""Writes a model as a Hugging Face directory, whole or in shards, and reads it back through transformers."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from . import models, tokenizer as tok

# Checkpoints written by transformers 5 say dtype and rope_parameters; the older ones say torch_dtype.
NEW_STYLE_KEY = "rope_parameters"
# Checkpoints that are read with their vision encoder.
SEEING = ("llama4", "muse_glimmer")


def fresh(folder: Path) -> Path:
    """An empty folder: what an earlier run left behind must not survive in a fixture."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    return folder


def write_side_files(folder: Path, raw: dict, dtype: str, tokenizer, template_as_file: bool = False) -> None:
    """config.json, generation_config.json and the tokenizer."""
    text = raw.get("text_config", raw)
    new = NEW_STYLE_KEY in text
    config = {**raw, ("dtype" if new else "torch_dtype"): dtype, "transformers_version": "5.0.0" if new else "4.51.0"}
    (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    generation = {
        "do_sample": True,
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": models.EOS - 2,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "transformers_version": config["transformers_version"],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tok.write(tokenizer, folder, template_as_file)


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """model.safetensors, or numbered shards with their index."""
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    meta = {"format": "pt"}
    if shards == 1:
        save_file(tensors, str(folder / "model.safetensors"), metadata=meta)
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        # Round robin, so that a layer's tensors really come from several files.
        part = {n: tensors[n] for n in names[shard::shards]}
        save_file(part, str(folder / file), metadata=meta)
        weight_map.update({n: file for n in part})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def reload(folder: Path) -> transformers.PreTrainedModel:
    """The directory through transformers' own loader, in float32: the reference judges the files, not our memory."""
    raw = json.loads((folder / "config.json").read_text())
    sees = raw["model_type"] in SEEING
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    # The MTP head of `nextn.py`, for which transformers has no class.
    head = f"model.layers.{raw.get('num_hidden_layers')}."
    unexpected = [key for key in info["unexpected_keys"] if not key.startswith(head)]
    assert not info["missing_keys"] and not unexpected, info
    # Without images, transformers 5.24 fails beyond the text model of Llama 4.
    return (model.language_model if raw["model_type"] == "llama4" else model).eval()
