"""Models with a SigLIP encoder: Gemma 3, whose pictures have one size and whose tokens see each other.

Cases as in vision.py, made by the processor of the files itself. The language model places tokens by their index, so there are no
`places`. `text` is the prompt as the chat template writes it.
"""

import torch
import transformers
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor

from . import models, reference, vision

EXTRA = ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "<unused0>"]
NAMED = {"boi_token": EXTRA[0], "eoi_token": EXTRA[1], "image_token": EXTRA[2]}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Six by six patches, nine tokens. The window is smaller than a picture.
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": vision.START,
    "eoi_token_index": vision.END,
    "image_token_index": vision.IMAGE,
    "mm_tokens_per_image": 9,
    "model_type": "gemma3",
    "text_config": {
        **{k: v for k, v in models.GEMMA3.items() if k != "architectures"},
        "hidden_size": 40, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 4, "num_key_value_heads": 1,
        "sliding_window": 7, "sliding_window_pattern": 3, "vocab_size": vision.TEXT["vocab_size"], "dtype": vision.DTYPE,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 24, "image_size": 24, "intermediate_size": 40, "layer_norm_eps": 1e-6,
        "model_type": "siglip_vision_model", "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 2, "patch_size": 4,
        "vision_use_head": False,
    },
}
MODELS = {"vl-gemma3": GEMMA3}

# As `vision.CASES`: nothing resized; wide; two, of which one is higher than it is wide.
CASES = {"aligned": [(0, 24, 24)], "wide": [(0, 20, 57)], "two": [(0, 44, 17), (0, 24, 24)]}


def processors(raw: dict):
    """The image processor."""
    side = raw["vision_config"]["image_size"]
    image = {
        "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
        "image_mean": [0.5] * 3, "image_seq_length": raw["mm_tokens_per_image"], "image_std": [0.5] * 3, "resample": 2,
        "rescale_factor": 1 / 255, "size": {"height": side, "width": side},
    }
    return (image, Gemma3ImageProcessor(**{k: v for k, v in image.items() if k != "image_seq_length"})), None


def blocks(values: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """Pictures [3, height, width] in the order of an encoder's rows: the patches of a token side by side."""
    count, _, height, width = values.shape
    values = values.reshape(count, 3, height // (merge * patch), merge, patch, width // (merge * patch), merge, patch)
    return values.permute(0, 2, 5, 3, 6, 1, 4, 7).flatten()


@torch.no_grad()
def case(model, _head, raw: dict, _tokenizer, name: str, seed: int, tail: str) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie."""
    processor = transformers.AutoProcessor.from_pretrained(model.name_or_path)
    items = CASES[name]
    shots = [torch.from_numpy(vision.picture(seed + i, 0, h, w)).permute(2, 0, 1) for i, (_, h, w) in enumerate(items)]
    parts = [{"type": "image"} for _ in items]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": tail}]}]
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    made = processor(text=[text], images=[shots], return_tensors="pt")
    ids, values = made["input_ids"][0].tolist(), made["pixel_values"]
    tokens, patch = raw["mm_tokens_per_image"], raw["vision_config"]["patch_size"]
    side = raw["vision_config"]["image_size"] // patch
    assert len(values) == len(items) and ids.count(vision.IMAGE) == tokens * len(values)
    assert made["token_type_ids"][0].tolist() == [int(i == vision.IMAGE) for i in ids]
    merge = side // int(tokens**0.5)
    sampled = [reference.short(v) for one in values for v in blocks(one[None], patch, merge)[::vision.PATCH_STEP]]
    after = lambda said: model(  # noqa: E731
        input_ids=torch.tensor([ids + said]), pixel_values=values, use_cache=False,
        token_type_ids=torch.tensor([[int(i == vision.IMAGE) for i in ids + said]]),
    ).logits[0, -1].float()
    path = vision.greedy_path(after)
    if path is None:
        return None
    wide = model.model.get_image_features(pixel_values=values).pooler_output.reshape(tokens * len(values), -1)
    return {
        "name": name,
        "pictures": [{"seed": seed + i, "frames": n, "height": h, "width": w} for i, (n, h, w) in enumerate(items)],
        "grids": [[1, side, side] for _ in items],
        "seconds": 1.0,
        "text": text,
        "ids": ids,
        "patches": sampled,
        "rows": [[row, [reference.short(v) for v in wide[row]]] for row in (1, tokens * len(values) - 2)],
        **path,
    }


def make(name: str, folder, tokenizer, seed: int) -> None:
    """One model with its reference."""
    vision.write(name, MODELS[name], folder, tokenizer, seed, EXTRA, NAMED, CHAT_TEMPLATE, processors, CASES, case)
