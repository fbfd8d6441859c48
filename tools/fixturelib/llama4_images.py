"""Llama 4 asked about pictures: tiles of one size with the whole behind them; each goes through the encoder by itself.

Cases as in vision.py, made by the processor of the files itself, which rounds values to bfloat16. `grids` has one entry a tile, in the
order of the prompt. The language model places tokens by their index, so there are no `places`. `text` is the prompt as the chat template
writes it.
"""

import torch
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

from . import idefics3, llama4, reference, vision
from . import tokenizer as tok

EXTRA = ["<|image_start|>", "<|image_end|>", "<|patch|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|image|>' }}{%- elif part['type'] == 'text' %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SIDE = 16
MODELS = {
    "vl-llama4": {
        **{k: v for k, v in llama4.WHOLE.items() if k not in ("image_token_index", "vision_config")},
        "image_token_index": vision.IMAGE,
        "text_config": {
            **llama4.WHOLE["text_config"], "head_dim": 16, "hidden_size": 32, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0],
            "num_hidden_layers": 2, "dtype": vision.DTYPE, "vocab_size": tok.VOCAB_SIZE + len(EXTRA),
        },
        "vision_config": {
            "hidden_act": "gelu", "hidden_size": 24, "image_size": SIDE, "intermediate_size": 96,
            "model_type": "llama4_vision_model", "norm_eps": 1e-5, "num_attention_heads": 2, "num_channels": 3,
            "num_hidden_layers": 2, "patch_size": 4, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 40,
            "projector_output_dim": 40, "rope_theta": 10000, "vision_feature_select_strategy": "default", "vision_output_dim": 40,
        },
    },
}
# What a file can express: every fourth layer does not rotate, and queries and keys are normed.
IN_FILE = {
    name: {**raw, "text_config": {**raw["text_config"], "no_rope_layers": [], "use_qk_norm": True}} for name, raw in MODELS.items()
}
# Names of the encoder's parts in mmproj.gguf, and of those of a layer.
PARTS = {
    "vision_model.class_embedding": "v.class_embd", "vision_model.positional_embedding_vlm": "v.position_embd.weight",
    "vision_model.patch_embedding.linear": "v.patch_embd", "vision_model.layernorm_pre": "v.pre_ln", "vision_model.layernorm_post": "v.post_ln",
    "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1", "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2",
    "multi_modal_projector.linear_1": "mm.model.fc",
}
LAYER = {
    "input_layernorm": "ln1", "post_attention_layernorm": "ln2", **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
}


def gguf_name(key: str) -> str:
    """The name of one of the encoder's tensors in mmproj.gguf."""
    if key in PARTS:
        return PARTS[key]
    module, leaf = key.rsplit(".", 1)
    if module.startswith("vision_model.model.layers."):
        layer, part = module.removeprefix("vision_model.model.layers.").split(".", 1)
        return f"v.blk.{layer}.{LAYER[part]}.{leaf}"
    return f"{PARTS[module]}.{leaf}"


# As `vision.CASES`: two by three tiles that are full; a strip, mostly black; less than a tile; two pictures, one with half a tile to spare.
CASES = {"full": [(0, 32, 48)], "strip": [(0, 7, 90)], "small": [(0, 9, 14)], "two": [(0, 70, 20), (0, 16, 16)]}


def processors(_raw: dict):
    """The image processor."""
    image = {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3, "max_patches": 6, "resample": 2, "rescale_factor": 1 / 255, "resize_to_max_canvas": False,
        "size": {"height": SIDE, "width": SIDE},
    }
    return (image, Llama4ImageProcessor(**image)), None


@torch.no_grad()
def case(model, _head, raw: dict, _tokenizer, name: str, seed: int, tail: str) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie."""
    items = CASES[name]
    text, ids, made = vision.asked(model, items, seed, tail)
    pixels = made["pixel_values"]
    patch = raw["vision_config"]["patch_size"]
    side = SIDE // patch
    assert pixels.dtype == torch.bfloat16 and ids.count(vision.IMAGE) == len(pixels) * (side // 2) ** 2
    pixels = pixels.float()
    sampled = [reference.short(v) for tile in pixels for v in idefics3.blocks(tile, patch, 2)[::vision.PATCH_STEP]]
    wide = model.vision_model(pixels).last_hidden_state
    wide = model.multi_modal_projector(wide.reshape(-1, wide.shape[-1]))

    def after(said: list[int]) -> torch.Tensor:
        # As the whole model's `forward`, which in transformers 5.24 asks the language model's output for what that does not have.
        tokens = torch.tensor([ids + said])
        embedded = model.get_input_embeddings()(tokens)
        embedded = embedded.masked_scatter((tokens == vision.IMAGE)[..., None], wide)
        return model.language_model(inputs_embeds=embedded, use_cache=False).logits[0, -1].float()

    path = vision.greedy_path(after)
    if path is None:
        return None
    return {
        "name": name,
        "pictures": [{"seed": seed + i, "frames": n, "height": h, "width": w} for i, (n, h, w) in enumerate(items)],
        "grids": [[1, side, side] for _ in pixels],
        "seconds": 1.0,
        "text": text,
        "ids": ids,
        "patches": sampled,
        "rows": [[row, [reference.short(v) for v in wide[row]]] for row in (1, len(wide) - 2)],
        **path,
    }


def make(name: str, folder, tokenizer, seed: int) -> None:
    """One model with its reference."""
    vision.write(name, MODELS[name], folder, tokenizer, seed, EXTRA, None, CHAT_TEMPLATE, processors, CASES, case)
