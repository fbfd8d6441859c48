"""Idefics3 and SmolVLM: pictures cut into squares of one size with the whole behind them; each square goes through the encoder by itself.

Cases as in vision.py, made by the processor of the files itself. `grids` has one entry a square, in the order of the prompt. The language
model places tokens by their index, so there are no `places`. `text` is the prompt as the chat template, the published one, writes it.
"""

import torch
from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor

from . import reference, vision

EXTRA = ["<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>"]
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
NAMED = None
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def model(kind: str, name: str, side: int, tied: bool) -> dict:
    """Squares of `side` pixels in patches of four, a token of two by two patches."""
    text = {k: v for k, v in vision.TEXT.items() if k != "tie_word_embeddings"}
    return {
        "architectures": [name],
        "image_seq_len": (side // 4 // 2) ** 2,
        "image_token_id": vision.IMAGE,
        "model_type": kind,
        "scale_factor": 2,
        "text_config": {
            **text, "architectures": ["VLlama3ForCausalLM"], "model_type": "llama", "rope_theta": 10000.0, "dtype": vision.DTYPE,
            "vocab_size": vision.TEXT["vocab_size"] + len(PLACES), "tie_word_embeddings": tied,
        },
        "tie_word_embeddings": tied,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 24, "image_size": side, "intermediate_size": 40, "layer_norm_eps": 1e-6,
            "model_type": f"{kind}_vision", "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 2, "patch_size": 4,
        },
    }


# Squares that are whole patches, and squares of which two rows and columns of pixels are not seen.
MODELS = {
    "vl-smolvlm": model("smolvlm", "SmolVLMForConditionalGeneration", 16, True),
    "vl-idefics3": model("idefics3", "Idefics3ForConditionalGeneration", 18, False),
}

# As `vision.CASES`: three by three squares; wide; a strip; two, of which one is high.
CASES = {"aligned": [(0, 48, 48)], "wide": [(0, 20, 57)], "strip": [(0, 3, 90)], "two": [(0, 70, 20), (0, 16, 16)]}


def longest(raw: dict) -> int:
    """The longer side of a picture before it is cut: three squares, or two."""
    return {16: 48, 18: 36}[raw["vision_config"]["image_size"]]


def processors(raw: dict):
    """The image processor."""
    image = {
        "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_image_size": {"longest_edge": raw["vision_config"]["image_size"]},
        "resample": 1, "rescale_factor": 1 / 255, "size": {"longest_edge": longest(raw)},
    }
    return (image, Idefics3ImageProcessor(**image)), None


def blocks(values: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """A square's patches in the order of an encoder's rows: those of a token side by side, channels before points."""
    side = values.shape[-1] // patch // merge
    seen = values[:, : side * merge * patch, : side * merge * patch]
    seen = seen.reshape(3, side, merge, patch, side, merge, patch)
    return seen.permute(1, 4, 2, 5, 0, 3, 6).flatten()


@torch.no_grad()
def case(model, _head, raw: dict, _tokenizer, name: str, seed: int, tail: str, items=None, made_by=None) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie. `made_by`: an image processor other than the files'."""
    items = items or CASES[name]
    text, ids, made = vision.asked(model, items, seed, tail, made_by)
    media = {key: made[key] for key in ("pixel_values", "pixel_attention_mask")}
    # Squares that fill up a batch are none here: there is one prompt.
    squares, merge, patch = media["pixel_values"][0], raw["scale_factor"], raw["vision_config"]["patch_size"]
    side = raw["vision_config"]["image_size"] // patch
    assert ids.count(vision.IMAGE) == len(squares) * (side // merge) ** 2
    sampled = [reference.short(v) for square in squares for v in blocks(square, patch, merge)[::vision.PATCH_STEP]]
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
        "grids": [[1, side, side] for _ in squares],
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
