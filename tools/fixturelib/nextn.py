"""MTP heads of GLM-4.5, GLM-4.7-Flash and DeepSeek-V3, which checkpoints store as the layer behind the last.

transformers leaves these heads out. `hybrid.MtpHead` makes one from transformers' decoder layer of the family, and says what
it computes: `eh_proj` is its `fc`, `enorm` and `hnorm` are the norms before it, `shared_head.norm` the one behind the layer.
Published checkpoints store the embedding and the output projection a second time in that layer; those of COPIES do here.
"""

import torch

from . import hybrid, models

SEED = 21
# Fixtures with a head. MLX's converter leaves the head out; `mlx-glm4-moe-4bit` stands for one that keeps it.
HEADS = (
    "glm4-moe", "mlx-glm4-moe-4bit", "gguf-glm4-moe-q8_0", "glm4.7-flash", "gguf-glm4.7-flash-q8_0", "deepseek-v3",
)
COPIES = ("glm4-moe", "gguf-glm4-moe-q8_0")

# Parts of the head's layer by their published names → those of hybrid.MtpHead.
PARTS = {
    "eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm",
}
COPIED = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
GGUF_NAMES = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.head": "nextn.shared_head_head",
}


def head_of(name: str, raw: dict, main, dtype: str) -> hybrid.MtpHead | None:
    """The head of a fixture, if it has one, with random weights."""
    if name not in HEADS:
        return None
    head = hybrid.MtpHead(raw, main).eval()
    models.randomise(head, raw, SEED, dtype)
    return head


def prefix(raw: dict) -> str:
    """What the names of the head's tensors begin with."""
    return f"model.layers.{raw['num_hidden_layers']}."


def with_head(name: str, raw: dict, tensors: dict[str, torch.Tensor], head) -> dict[str, torch.Tensor]:
    """The tensors of a model and, if it has one, of its head."""
    if head is None:
        return tensors
    published = {own: part for part, own in PARTS.items()}
    out = dict(tensors)
    for key, tensor in head.state_dict().items():
        module, _, leaf = key.rpartition(".")
        rest = f"{published[module]}.{leaf}" if module in published else key.removeprefix("layers.0.")
        out[prefix(raw) + rest] = tensor.detach()
    if name in COPIES:
        out.update({f"{prefix(raw)}{part}.weight": tensors[f"{source}.weight"] for part, source in COPIED.items()})
    return out


def with_blocks(raw: dict, head) -> dict:
    """The config whose layers are the blocks of a GGUF file: the head's is one of them."""
    return raw if head is None else {**raw, "num_hidden_layers": raw["num_hidden_layers"] + 1}


def load(raw: dict, main, head, tensors: dict[str, torch.Tensor]) -> None:
    """Puts the tensors of `with_head` back. The head reads the model's embedding and output projection, not the copies."""
    of_head = {}
    for key in [key for key in tensors if key.startswith(prefix(raw))]:
        tensor, (module, _, leaf) = tensors.pop(key), key.removeprefix(prefix(raw)).rpartition(".")
        if module not in COPIED:
            own = PARTS.get(module, f"layers.0.{module}")
            of_head[f"{own}.{leaf}"] = tensor.float()
    models.load_state(main, tensors)
    if head is not None:
        head.load_state_dict(of_head, strict=True)
    else:
        assert not of_head, of_head.keys()
