"""InternVL in the form of transformers: pictures cut into tiles, frames of videos as tiles, words around them.

Cases as in vision.py, made by the processor of the files itself. A grid has a frame for each tile; the language models place
tokens by their index, so there are no `places`.
"""

import torch
import transformers
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

from . import reference, vision

EXTRA = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
NAMED = {
    "context_image_token": "<IMG_CONTEXT>", "end_image_token": "</img>", "start_image_token": "<img>", "video_token": "<video>",
}
# What stands for a medium is not what the model reads: the processor puts words around it.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% elif part['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def intern(model_type: str, **encoder) -> dict:
    """An InternVL of the published form: tiles of 16 pixels, 4 tokens each."""
    text = {**vision.TEXT, "architectures": [], "head_dim": 16, "model_type": model_type, "rope_theta": 10000.0,
            "num_hidden_layers": 1}
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
        "image_token_id": vision.IMAGE,
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": {**text, "dtype": vision.DTYPE},
        "tie_word_embeddings": True,
        "vision_config": {
            "hidden_size": 24, "image_size": [16, 16], "intermediate_size": 40, "layer_norm_eps": 1e-6,
            "model_type": "internvl_vision", "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": [4, 4], **encoder,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


# The two kinds of encoder that are published: of 300 million weights, and of 6 billion.
MODELS = {
    "vl-intern": intern("qwen2", attention_bias=True, norm_type="layer_norm"),
    "vl-intern-rms": intern("qwen3", norm_type="rms_norm", use_mean_pooling=True, use_qk_norm=True),
}

# As `vision.CASES`: one tile and nothing resized; two tiles and a thumbnail; a column of tiles, and one by itself; a strip; frames.
CASES = {
    "aligned": [(0, 16, 16)],
    "one": [(0, 24, 40)],
    "two": [(0, 44, 17), (0, 16, 16)],
    "strip": [(0, 9, 90)],
    "video": [(3, 20, 24)],
    "both": [(0, 32, 16), (2, 16, 16)],
}


def processors(_raw: dict):
    """The image and the video processor."""
    both = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 16, "width": 16}}
    image = {**both, "crop_to_patches": True, "max_patches": 4, "min_patches": 1}
    return (image, GotOcr2ImageProcessor(**image)), (both, InternVLVideoProcessor(**both))


@torch.no_grad()
def case(model, _head, raw: dict, _tokenizer, name: str, seed: int, tail: str) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie."""
    processor = transformers.AutoProcessor.from_pretrained(model.name_or_path)
    items, media, counts, parts = CASES[name], {"images": [], "videos": []}, [], []
    for i, (frames, height, width) in enumerate(items):
        shots = [torch.from_numpy(vision.picture(seed + i, frame, height, width)).permute(2, 0, 1) for frame in range(max(frames, 1))]
        if frames:
            media["videos"].append(torch.stack(shots))
            counts.append(frames)
        else:
            media["images"].append(shots[0])
            counts.append(int(processor.image_processor(images=shots, return_tensors="pt", crop_to_patches=True)["num_patches"][0]))
        parts.append({"type": "video" if frames else "image"})
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": tail}]}]
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    made = processor(text=[text], return_tensors="pt", **{kind: found for kind, found in media.items() if found})
    ids, values = made["input_ids"][0].tolist(), made["pixel_values"]
    per_tile = raw["image_seq_length"]
    assert len(values) == sum(counts) and ids.count(vision.IMAGE) == per_tile * len(values)
    # In the order of an encoder's rows: blocks of two by two patches of four by four pixels.
    split = values.split(counts)
    blocks = [tiles.reshape(-1, 3, 2, 2, 4, 2, 2, 4).permute(0, 2, 5, 3, 6, 1, 4, 7).flatten() for tiles in split]
    sampled = [reference.short(v) for block in blocks for v in block[::vision.PATCH_STEP]]
    after = lambda said: model(  # noqa: E731
        input_ids=torch.tensor([ids + said]), pixel_values=values, use_cache=False
    ).logits[0, -1].float()
    path = vision.greedy_path(after)
    if path is None:
        return None
    wide = model.model.get_image_features(pixel_values=values).pooler_output.reshape(per_tile * len(values), -1)
    return {
        "name": name,
        "pictures": [{"seed": seed + i, "frames": n, "height": h, "width": w} for i, (n, h, w) in enumerate(items)],
        "grids": [[count, 4, 4] for count in counts],
        "seconds": 1.0,
        "text": text,
        "ids": ids,
        "patches": sampled,
        "rows": [[row, [reference.short(v) for v in wide[row]]] for row in (1, per_tile * len(values) - 2)],
        **path,
    }


def make(name: str, folder, tokenizer, seed: int) -> None:
    """One model with its reference."""
    vision.write(name, MODELS[name], folder, tokenizer, seed, EXTRA, NAMED, CHAT_TEMPLATE, processors, CASES, case)
