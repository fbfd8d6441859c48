"""LFM2-VL: pictures resized whole, or cut into tiles with the whole behind them; each piece goes through the encoder by itself.

Cases as in vision.py, made by the processor of the files itself. `grids` has one entry a piece, in the order of the prompt. The language
model places tokens by their index, so there are no `places`. `text` is the prompt as the chat template writes it.
"""

import torch
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

from . import families, reference, vision

# The fourth is the last that all vision models have; of places there are those of up to four tiles.
EXTRA = ["<|image_start|>", "<|image_end|>", "<image>", "<|img_thumbnail|>"]
PLACES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5) if row * column <= 4]
NAMED = {
    "image_start_token": EXTRA[0], "image_end_token": EXTRA[1], "image_token": EXTRA[2], "image_thumbnail_token": EXTRA[3],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def lfm2_vl(**projector) -> dict:
    """Tiles of 16 pixels and four tokens; pictures of two to six tokens; a table of six by six positions."""
    text = {k: v for k, v in families.LFM2.items() if k not in ("architectures", "full_attn_idxs")}
    return {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "downsample_factor": 2,
        "image_token_id": vision.IMAGE,
        "model_type": "lfm2_vl",
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 40,
        **projector,
        "text_config": {
            **text, "block_ff_dim": 96, "intermediate_size": 96, "hidden_size": 32, "layer_types": ["conv", "full_attention", "conv"],
            "num_attention_heads": 2, "num_hidden_layers": 3, "num_key_value_heads": 1, "dtype": vision.DTYPE,
            "vocab_size": vision.TEXT["vocab_size"] + len(PLACES),
        },
        "tie_word_embeddings": True,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 24, "intermediate_size": 40, "layer_norm_eps": 1e-6,
            "model_type": "siglip2_vision_model", "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 2,
            "num_patches": 36, "patch_size": 4, "vision_use_head": False,
        },
    }


# The two kinds that are published.
MODELS = {
    "vl-lfm2": lfm2_vl(projector_bias=True, projector_use_layernorm=True),
    "vl-lfm2-bare": lfm2_vl(projector_bias=True, projector_use_layernorm=False),
}

# As `vision.CASES`: nothing resized; small; a strip; two tiles; four tiles above one another, and a picture that stays whole.
CASES = {
    "aligned": [(0, 16, 24)],
    "small": [(0, 6, 9)],
    "strip": [(0, 9, 44)],
    "tiles": [(0, 30, 50)],
    "two": [(0, 70, 20), (0, 16, 16)],
}

# Those that are not cut: a GGUF file says nothing of tiles.
STILL = ["aligned", "small", "strip"]


def processors(raw: dict):
    """The image processor. The published files say that it does not resize, which it does all the same."""
    image = {
        "do_image_splitting": True, "do_normalize": True, "do_rescale": True, "do_resize": False, "downsample_factor": 2,
        "encoder_patch_size": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_image_tokens": 6, "max_pixels_tolerance": 2.0,
        "max_tiles": 4, "min_image_tokens": 2, "min_tiles": 2, "resample": 2, "rescale_factor": 1 / 255, "tile_size": 16,
        # One of the two puts no whole picture behind the tiles.
        "use_thumbnail": raw["projector_use_layernorm"],
    }
    return (image, Lfm2VlImageProcessor(**image)), None


def blocks(values: torch.Tensor, grid: list[int], patch: int, merge: int) -> torch.Tensor:
    """A piece's patches in the order of an encoder's rows and columns: those of a token side by side, channels before points."""
    _, height, width = grid
    values = values[: height * width].reshape(height // merge, merge, width // merge, merge, patch, patch, 3)
    return values.permute(0, 2, 1, 3, 6, 4, 5).flatten()


@torch.no_grad()
def case(model, _head, raw: dict, _tokenizer, name: str, seed: int, tail: str, items=None, made_by=None) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie. `made_by`: an image processor other than the files'."""
    items = items or CASES[name]
    text, ids, made = vision.asked(model, items, seed, tail, made_by)
    media = {key: made[key] for key in ("pixel_values", "spatial_shapes", "pixel_attention_mask")}
    grids = [[1, *shape] for shape in media["spatial_shapes"].tolist()]
    merge, patch = raw["downsample_factor"], raw["vision_config"]["patch_size"]
    assert ids.count(vision.IMAGE) == sum(h * w for _, h, w in grids) // merge**2
    pieces = zip(media["pixel_values"], grids)
    sampled = [reference.short(v) for one, grid in pieces for v in blocks(one, grid, patch, merge)[::vision.PATCH_STEP]]
    after = lambda said: model(  # noqa: E731
        input_ids=torch.tensor([ids + said]), use_cache=False, **media
    ).logits[0, -1].float()
    path = vision.greedy_path(after)
    if path is None:
        return None
    wide = torch.cat(model.model.get_image_features(**media).pooler_output)
    return {
        "name": name,
        "pictures": [{"seed": seed + i, "frames": n, "height": h, "width": w} for i, (n, h, w) in enumerate(items)],
        "grids": grids,
        "seconds": 1.0,
        "text": text,
        "ids": ids,
        "patches": sampled,
        "rows": [[row, [reference.short(v) for v in wide[row]]] for row in (1, len(wide) - 2)],
        **path,
    }


def make(name: str, folder, tokenizer, seed: int) -> None:
    """One model with its reference."""
    vision.write(name, MODELS[name], folder, tokenizer, seed, EXTRA + PLACES, NAMED, CHAT_TEMPLATE, processors, CASES, case)
