"""Mistral 3 with Pixtral's encoder: pictures of any grid, whose tokens stand in rows with a word behind each.

Cases as in vision.py, made by the processor of the files itself. The language model places tokens by their index, so there are no
`places`. `text` is the prompt as the chat template writes it.
"""

import torch
from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor

from . import reference, vision

EXTRA = ["[IMG_BREAK]", "[IMG_END]", "[IMG]", "<unused0>"]
NAMED = {"image_break_token": EXTRA[0], "image_end_token": EXTRA[1], "image_token": EXTRA[2]}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '[IMG]' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def model(merge: int, bias: bool, act: str) -> dict:
    """Patches of four pixels, a token of `merge` by `merge` patches."""
    text = {k: v for k, v in vision.TEXT.items() if k != "tie_word_embeddings"}
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": vision.IMAGE,
        "model_type": "mistral3",
        "multimodal_projector_bias": bias,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": merge,
        "text_config": {
            **text, "head_dim": 16, "model_type": "mistral", "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "sliding_window": None,
            "dtype": vision.DTYPE, "tie_word_embeddings": False,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "head_dim": 12, "hidden_act": act, "hidden_size": 24, "image_size": 48, "intermediate_size": 40, "model_type": "pixtral",
            "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 2, "patch_size": 4,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
        },
    }


# As published, and with what the code allows beside.
MODELS = {"vl-mistral3": model(2, False, "silu"), "vl-mistral3-other": model(3, True, "gelu")}

# As `vision.CASES`: nothing resized; small, with two tokens (one fails in the reference); a strip; one that is reduced; two.
CASES = {
    "aligned": [(0, 16, 24)],
    "small": [(0, 6, 14)],
    "strip": [(0, 3, 90)],
    "wide": [(0, 57, 100)],
    "two": [(0, 70, 20), (0, 16, 16)],
}


def processors(raw: dict):
    """The image processor; one of the two says its patches' sides one by one."""
    patch = raw["vision_config"]["patch_size"]
    image = {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": {"height": patch, "width": patch}, "resample": 3, "rescale_factor": 1 / 255, "size": {"longest_edge": 45},
    }
    return (image, PixtralImageProcessor(**image)), None


def blocks(values: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """A picture's patches in the order of an encoder's rows: those of a token side by side, channels before points."""
    _, height, width = values.shape
    side = patch * merge
    values = values.reshape(3, height // side, merge, patch, width // side, merge, patch)
    return values.permute(1, 4, 2, 5, 0, 3, 6).flatten()


@torch.no_grad()
def case(model, _head, raw: dict, _tokenizer, name: str, seed: int, tail: str, items=None, made_by=None) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie. `made_by`: an image processor other than the files'."""
    items = items or CASES[name]
    text, ids, made = vision.asked(model, items, seed, tail, made_by)
    media = {key: made[key] for key in ("pixel_values", "image_sizes")}
    merge, patch = raw["spatial_merge_size"], raw["vision_config"]["patch_size"]
    sizes = media["image_sizes"].tolist()
    assert ids.count(vision.IMAGE) == sum(h * w for h, w in sizes) // (patch * merge) ** 2
    shown = [shot[:, :h, :w] for shot, (h, w) in zip(media["pixel_values"], sizes)]
    sampled = [reference.short(v) for shot in shown for v in blocks(shot, patch, merge)[::vision.PATCH_STEP]]
    after = lambda said: model(  # noqa: E731
        input_ids=torch.tensor([ids + said]), use_cache=False, **media
    ).logits[0, -1].float()
    path = vision.greedy_path(after)
    if path is None:
        return None
    wide = torch.cat(list(model.model.get_image_features(**media).pooler_output))
    return {
        "name": name,
        "pictures": [{"seed": seed + i, "frames": n, "height": h, "width": w} for i, (n, h, w) in enumerate(items)],
        "grids": [[1, h // patch, w // patch] for h, w in sizes],
        "seconds": 1.0,
        "text": text,
        "ids": ids,
        "patches": sampled,
        "rows": [[row, [reference.short(v) for v in wide[row]]] for row in (1, len(wide) - 2)],
        **path,
    }


def make(name: str, folder, tokenizer, seed: int) -> None:
    """One model with its reference."""
    vision.write(name, MODELS[name], folder, tokenizer, seed, EXTRA, NAMED, CHAT_TEMPLATE, processors, CASES, case)
