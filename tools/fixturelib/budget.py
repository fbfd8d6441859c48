"""Gemma 4 with its encoder: pictures of any aspect, and frames of videos, that fill a budget of tokens.

Cases as in vision.py, made by the processor of the files itself. The language model places tokens by their index, so there are no
`places`. `text` is the prompt as the chat template writes it.

`vl-gemma4` has what the large sizes have: tokens of a picture that see each other in sliding layers, tokens that are shifted and
scaled, experts. `vl-gemma4-e2b` has what the small ones have: bounds around linear layers, an embedding for each layer.
"""

import torch
import transformers
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
from transformers.video_utils import VideoMetadata

from . import gemma4, reference, siglip, vision

EXTRA = ["<|image>", "<image|>", "<|image|>", "<|video|>"]
NAMED = {"boi_token": EXTRA[0], "eoi_token": EXTRA[1], "image_token": EXTRA[2]}
CHAT_TEMPLATE = siglip.CHAT_TEMPLATE.replace("<start_of_image>", EXTRA[2]).replace(
    "{% elif part['type'] == 'text' %}", "{% elif part['type'] == 'video' %}{{ '<|video|>' }}{% elif part['type'] == 'text' %}"
)

# A budget is 70 tokens at least. One token has three by three patches of three by three pixels.
BUDGET, PATCH, POOL = 70, 3, 3


def outer(text: dict, **encoder) -> dict:
    """A composite configuration."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "boi_token_id": vision.START,
        "eoi_token_id": vision.END,
        "image_token_id": vision.IMAGE,
        "model_type": "gemma4",
        "text_config": {
            **{k: v for k, v in text.items() if k != "architectures"},
            "hidden_size": 40, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 23,
            "vocab_size": vision.TEXT["vocab_size"], "vocab_size_per_layer_input": vision.TEXT["vocab_size"], "dtype": vision.DTYPE,
        },
        "tie_word_embeddings": True,
        "video_token_id": vision.VIDEO,
        "vision_config": {
            "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 32, "intermediate_size": 40,
            "model_type": "gemma4_vision", "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
            "patch_size": PATCH, "pooling_kernel_size": POOL, "position_embedding_size": 216, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"}, **encoder,
        },
    }


MODELS = {
    "vl-gemma4": outer(gemma4.MOE, standardize=True, use_clipped_linears=False),
    "vl-gemma4-e2b": outer({**gemma4.E2B, "hidden_size_per_layer_input": 16}, standardize=False, use_clipped_linears=True),
}

# As `vision.CASES`: nothing resized; enlarged and wide; a strip beside a high one that becomes smaller; a video; a video of strips
# beside a picture. FPS: frames a second.
STILL = {"aligned": [(0, 63, 90)], "wide": [(0, 20, 57)], "two": [(0, 2, 300), (0, 244, 117)]}
CASES = {**STILL, "video": [(3, 30, 44)], "both": [(2, 3, 170), (0, 9, 9)]}
FPS = 2.0


def processors(raw: dict):
    """The image and the video processor."""
    image = {
        "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "image_mean": [0.0] * 3,
        "image_seq_length": BUDGET, "image_std": [1.0] * 3, "max_soft_tokens": BUDGET, "patch_size": PATCH,
        "pooling_kernel_size": POOL, "resample": 3, "rescale_factor": 1 / 255,
    }
    made = Gemma4ImageProcessor(**{k: v for k, v in image.items() if k != "image_seq_length"})
    video = {**{k: v for k, v in image.items() if k != "image_seq_length"}, "do_normalize": True, "num_frames": 2}
    return (image, made), (video, Gemma4VideoProcessor(**video))


def whole_processor(folder) -> Gemma4Processor:
    """The processor of the files; what it would do with sound is not in them."""
    made = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(), image_processor=Gemma4ImageProcessor.from_pretrained(folder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        video_processor=Gemma4VideoProcessor.from_pretrained(folder, do_sample_frames=False),
        image_seq_length=BUDGET,
    )
    made.boa_token = made.eoa_token = ""
    return made


def blocks(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The patches of one picture in the order of an encoder's rows: those of a token side by side, colours before points."""
    width = int(places[:, 0].max()) + 1
    height = len(values) // width
    values = 2 * (values - 0.5)
    values = values.reshape(height // POOL, POOL, width // POOL, POOL, PATCH, PATCH, 3)
    return values.permute(0, 2, 1, 3, 6, 4, 5).flatten()


def joined(items, of_pictures: list, of_videos: list) -> list:
    """What pictures and videos have, in the order of the prompt."""
    pictures, videos = iter(of_pictures), iter(of_videos)
    return [next(videos if frames else pictures) for frames, _, _ in items]


def seen(made, items, ordered=blocks) -> tuple[list, list]:
    """Grids and patches of the items, from what the processor has made; `ordered` puts the patches of one picture in an encoder's order."""
    grids, patches = [], []
    at = {"video": 0, "picture": 0}
    for frames, _, _ in items:
        kind, count = ("video", frames) if frames else ("picture", 1)
        values, places = (made["pixel_values_videos"], made["video_position_ids"]) if frames else (made["pixel_values"], made["image_position_ids"])
        own = slice(at[kind], at[kind] + count)
        at[kind] += count
        shots = [(v[(p >= 0).all(-1)], p[(p >= 0).all(-1)]) for v, p in zip(values[own], places[own])]
        width, height = (int(shots[0][1].max(0).values[axis]) + 1 for axis in (0, 1))
        grids.append([count, height, width])
        patches.append(torch.cat([ordered(v, p) for v, p in shots]))
    return grids, patches


def no_masks(_model, _ids, _kinds) -> dict:
    """The masks are the model's own."""
    return {}


@torch.no_grad()
def case(model, _head, raw: dict, _tokenizer, name: str, seed: int, tail: str, own=(whole_processor, blocks, POOL, no_masks)) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie. `own`: the processor, the order of patches, patches per side of
    a token, and what the model is given beside that."""
    made_of, ordered, pool, masks = own
    processor = made_of(model.name_or_path)
    items = CASES[name]
    shots = [
        torch.stack([torch.from_numpy(vision.picture(seed + i, at, h, w)).permute(2, 0, 1) for at in range(max(n, 1))])
        for i, (n, h, w) in enumerate(items)
    ]
    parts = [{"type": "video" if n else "image"} for n, _, _ in items]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": tail}]}]
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    pictures = [shot[0] for shot, (n, _, _) in zip(shots, items) if not n]
    videos = [shot for shot, (n, _, _) in zip(shots, items) if n]
    about = [VideoMetadata(total_num_frames=len(v), fps=FPS, frames_indices=list(range(len(v)))) for v in videos]
    media = ({"images": [pictures]} if pictures else {}) | ({"videos": [videos], "video_metadata": [about]} if videos else {})
    made = processor(text=[text], return_tensors="pt", **media)
    ids = made["input_ids"][0].tolist()
    kinds = lambda ids: [{vision.IMAGE: 1, vision.VIDEO: 2}.get(i, 0) for i in ids]  # noqa: E731
    grids, patches = seen(made, items, ordered)
    tokens = sum(n * h * w for n, h, w in grids) // pool**2
    assert sum(kind > 0 for kind in kinds(ids)) == tokens
    assert made["mm_token_type_ids"][0].tolist() == kinds(ids)
    sampled = [reference.short(v) for one in patches for v in one[::vision.PATCH_STEP]]
    given = {k: v for k, v in made.items() if k.startswith(("pixel_values", "image_position", "video_position", "num_frames_per"))}
    after = lambda said: model(  # noqa: E731
        input_ids=torch.tensor([ids + said]), mm_token_type_ids=torch.tensor([kinds(ids + said)]), use_cache=False, **given,
        **masks(model, ids + said, kinds(ids + said)),
    ).logits[0, -1].float()
    path = vision.greedy_path(after)
    if path is None:
        return None
    of_pictures, of_videos = [], []
    if pictures:
        of_pictures = model.model.get_image_features(given["pixel_values"], given["image_position_ids"]).pooler_output
    if videos:
        of_videos = model.model.get_video_features(
            given["pixel_values_videos"], given["video_position_ids"], given["num_frames_per_video"]
        ).pooler_output
    wide = torch.cat(joined(items, of_pictures, of_videos))
    assert len(wide) == tokens
    return {
        "name": name,
        "pictures": [{"seed": seed + i, "frames": n, "height": h, "width": w} for i, (n, h, w) in enumerate(items)],
        "grids": grids,
        "seconds": 1.0,
        "text": text,
        "ids": ids,
        "patches": sampled,
        "rows": [[row, [reference.short(v) for v in wide[row]]] for row in (1, tokens // 2, tokens - 2)],
        **path,
    }


def make(name: str, folder, tokenizer, seed: int) -> None:
    """One model with its reference."""
    vision.write(name, MODELS[name], folder, tokenizer, seed, EXTRA, NAMED, CHAT_TEMPLATE, processors, CASES, case)
