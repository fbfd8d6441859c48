"""A tiny nomic-bert whose odd layers have experts (nomic-embed-text-v2-moe), as safetensors and as GGUF.

transformers 5.24 has no class for it. The reference is transformers' NomicBertModel with biases in its attention, and two feed-forward
parts of our own after the code beside the checkpoint, `modeling_hf_nomic_bert.py`: one without a gate, and one of experts, whose weights
are the softmax over all experts and are not scaled to sum to 1. One bias follows the sum of the experts. llama.cpp's converter leaves that
bias out, and so does the GGUF file, with a reference of its own.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from . import checkpoint, encoder_files, encoders, reference
from .gguf_export import stored

RAW = {
    **encoders.NOMIC_ORIGINAL, "activation_function": "gelu", "expert_choice_router": False, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
    "moe_every_n_layers": 2, "moe_normalize_expert_weights": False, "moe_top_k": 2, "n_embd": 64, "n_head": 4, "n_inner": 96, "n_layer": 3,
    "num_experts": 5, "num_shared_experts": 0, "qkv_proj_bias": True, "rotary_scaling_factor": None, "type_vocab_size": 1,
}
NAMES = ("bert-nomic-moe", "bert-gguf-nomic-moe")
HIDDEN, WIDTH, COUNT = RAW["n_embd"], RAW["n_inner"], RAW["num_experts"]
GGUF_NAMES = {
    "emb_ln": "token_embd_norm", "embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types",
    "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "norm1": "attn_output_norm", "norm2": "layer_output_norm",
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "mlp.router.layer": "ffn_gate_inp", "mlp.experts.mlp.w1": "ffn_up_exps",
    "mlp.experts.mlp.w2": "ffn_down_exps",
}


class Plain(nn.Module):
    """The feed-forward part without a gate."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x):
        """`x`: batch, positions, hidden."""
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Inner(nn.Module):
    """The experts' matrices, one below the other, both with the hidden size as columns."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.empty(COUNT * WIDTH, HIDDEN)) for _ in range(2))


class Experts(nn.Module):
    """The matrices, and the bias after the sum."""

    def __init__(self):
        super().__init__()
        self.mlp, self.bias = Inner(), nn.Parameter(torch.zeros(HIDDEN))


class Mixture(nn.Module):
    """The feed-forward part of experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.ModuleDict({"layer": nn.Linear(HIDDEN, COUNT, bias=False)}), Experts()

    def forward(self, x):
        """`x`: batch, positions, hidden."""
        weights = torch.softmax(self.router["layer"](x), -1)
        least = torch.topk(weights, RAW["moe_top_k"], dim=-1).values[..., -1:]
        chosen = torch.where(weights >= least, weights, 0.0)
        up, down = (w.view(COUNT, WIDTH, HIDDEN) for w in (self.experts.mlp.w1, self.experts.mlp.w2))
        inner = nn.functional.gelu(torch.einsum("bph,ewh->bpew", x, up))
        return torch.einsum("bpe,bpew,ewh->bph", chosen, inner, down) + self.experts.bias


def build() -> nn.Module:
    """The model, its weights not yet set."""
    config = transformers.NomicBertConfig(**encoders.of_original(RAW))
    config._attn_implementation = "eager"
    model = transformers.NomicBertModel(config, add_pooling_layer=False)
    for number, layer in enumerate(model.layers):
        for part in "qkvo":
            setattr(layer.self_attn, f"{part}_proj", nn.Linear(HIDDEN, HIDDEN))
        layer.mlp = Mixture() if number % RAW["moe_every_n_layers"] == 1 else Plain()
    return model.float().eval()


def write_gguf(path: Path, tensors: dict, tokenizer: Tokenizer) -> dict:
    """The file, and what it has under the names of the checkpoint."""
    writer = gguf.GGUFWriter(path, "nomic-bert-moe")
    writer.add_name("nomic-bert-moe")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(RAW["n_positions"])
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(RAW["n_layer"])
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(RAW["n_head"])
    writer.add_layer_norm_eps(RAW["layer_norm_epsilon"])
    writer.add_causal_attention(False)
    writer.add_rope_freq_base(RAW["rotary_emb_base"])
    writer.add_moe_every_n_layers(RAW["moe_every_n_layers"])
    writer.add_expert_count(COUNT)
    writer.add_expert_used_count(RAW["moe_top_k"])
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    encoder_files.write_tokenizer(writer, RAW, tokenizer)
    shapes = {}
    for name, tensor in tensors.items():
        w = tensor.float().numpy()
        if ".experts.mlp." in name:
            w = w.reshape(COUNT, WIDTH, HIDDEN)
            w = w.swapaxes(1, 2) if name.endswith("w2") else w
        floats = w.ndim == 1 or "router" in name or "token_type" in name
        # One row: a vector, as llama.cpp's tools leave it.
        w = w[0] if "token_type" in name else w
        module, leaf = (name, "weight") if name.endswith((".w1", ".w2")) else name.rsplit(".", 1)
        layer, module = module.removeprefix("encoder.layers.").split(".", 1) if module.startswith("encoder.") else ("", module)
        target = f"blk.{layer}.{GGUF_NAMES[module]}.{leaf}" if layer else f"{GGUF_NAMES[module]}.{leaf}"
        kind = Q.F32 if floats else Q.Q8_0
        writer.add_tensor(target, np.ascontiguousarray(stored(np.ascontiguousarray(w), kind, 0)), raw_dtype=kind)
        shapes[target] = (name, w.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name, shape = shapes.pop(tensor.name)
        w = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        w = w.swapaxes(1, 2) if name.endswith(".w2") else w
        read[name] = torch.from_numpy(np.ascontiguousarray(w)).reshape(tensors[name].shape)
    assert not shapes, shapes
    return read


def set_weights(model: nn.Module, published: dict) -> None:
    """Gives the model the tensors of a checkpoint, by their names there."""
    for name, parameter in model.named_parameters():
        if ".self_attn." in name and "o_proj" not in name:
            part = name.split("_proj.")[0][-1]
            key = name.replace(f"self_attn.{part}_proj", "attn.Wqkv").replace("layers.", "encoder.layers.")
            parameter.data.copy_(published[key].chunk(3)["qkv".index(part)])
        else:
            (key,) = encoders.with_original_names({name: parameter.data})
            parameter.data.copy_(published[key] if key in published else torch.zeros_like(parameter))


@torch.no_grad()
def make(name: str, folder: Path, seed: int) -> None:
    """One form with its reference."""
    tokenizer = Tokenizer.from_file(str(folder.parent / "bert" / "tokenizer.json"))
    model = build()
    tensors = {
        key: torch.from_numpy(np.ascontiguousarray(encoders._tensor(seed, key, value.shape), dtype=np.float32)).half()
        for key, value in model.named_parameters()
    }
    tensors = encoders.with_original_names(tensors)
    checkpoint.fresh(folder)
    if name == "bert-nomic-moe":
        config = {**RAW, "torch_dtype": "float16", "transformers_version": "4.51.0"}
        (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        side = {"cls_token": "[CLS]", "sep_token": "[SEP]", "tokenizer_class": "BertTokenizer"}
        (folder / "tokenizer_config.json").write_text(json.dumps(side, indent=2) + "\n")
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    else:
        tensors = write_gguf(folder / "model.gguf", {k: v for k, v in tensors.items() if not k.endswith("experts.bias")}, tokenizer)
    set_weights(model, tensors)
    result = {"model": name, "texts": [encoders.one(model, tokenizer, given, []) for given in encoders.TEXTS]}
    reference.dump(result, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{name:26} {size / 1000:7.0f} kB", flush=True)
