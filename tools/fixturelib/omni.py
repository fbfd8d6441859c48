"""A tiny model that hears and sees: the thinker of a Qwen3-Omni, named on disk as the published checkpoint is.

Sounds are made by `sound`, a formula of whole numbers that a test repeats; pictures by that of vision.py. `reference.json` holds
`cases` as described there, and for each item besides: `kind`, of a sound `samples` and its spectrogram's `frames`, and
`of_video` if it is the audio track of the video before it. `patches` are every
`PATCH_STEP`-th value of the processor's patches or of a sound's spectrogram (frame by frame). `places` may lie between whole
steps, where a video's frames do.

Qwen2.5-Omni, in omni2_5.py, differs in a `Kind`.

`mel` holds the feature extractor's numbers for a sound at the published sizes (128 bands): every `MEL_STEP`-th value. `lengths` are
placeholders that the processor writes for so many samples: [samples, tokens].
"""

import json
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Callable

import numpy as np
import torch
import transformers
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    Qwen3OmniMoeProcessor,
    _get_feat_extract_output_lengths,
)

from . import checkpoint, models, reference, vision
from . import tokenizer as tok

DTYPE = "bfloat16"
PATCH_STEP = 131
MEL_STEP = 997
RATE = 16_000
EXTRA = [*vision.EXTRA, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
START, END, IMAGE, VIDEO, AUDIO_START, AUDIO_END, AUDIO = range(tok.VOCAB_SIZE, tok.VOCAB_SIZE + len(EXTRA))
BANDS = 20

CHAT_TEMPLATE = vision.CHAT_TEMPLATE.replace(
    "{%- elif 'text' in part %}",
    "{%- elif part['type'] == 'audio' or 'audio' in part or 'audio_url' in part %}"
    "{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}{%- elif 'text' in part %}",
)
assert "audio_pad" in CHAT_TEMPLATE

TEXT = {
    **vision.TEXT, **vision.MOE, "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 32, "mlp_only_layers": [],
    "model_type": "qwen3_omni_moe_text", "moe_intermediate_size": 24, "norm_topk_prob": True, "num_hidden_layers": 3,
    "rope_scaling": {**vision.MROPE3, "rope_type": "default"}, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "vocab_size": tok.VOCAB_SIZE + len(EXTRA), "dtype": DTYPE,
}
# Two windows of a second attend to each other; the bands are no power of two.
AUDIO_TOWER = {
    "activation_function": "gelu", "conv_chunksize": 500, "d_model": 24, "downsample_hidden_size": 6,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 40, "encoder_layers": 2, "max_source_positions": 1500,
    "model_type": "qwen3_omni_moe_audio_encoder", "n_window": 50, "n_window_infer": 200, "num_mel_bins": BANDS, "output_dim": 32,
    "scale_embedding": False,
}
RAW = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "enable_audio_output": False,
    "im_end_token_id": models.EOS,
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "audio_config": AUDIO_TOWER,
        "audio_end_token_id": AUDIO_END,
        "audio_start_token_id": AUDIO_START,
        "audio_token_id": AUDIO,
        "dtype": DTYPE,
        "image_token_id": IMAGE,
        "model_type": "qwen3_omni_moe_thinker",
        "position_id_per_seconds": 13,
        "text_config": TEXT,
        "video_token_id": VIDEO,
        "vision_config": {
            **vision.QWEN3_TOWER, "deepstack_visual_indexes": [0, 1], "hidden_size": 24,
            "model_type": "qwen3_omni_moe_vision_encoder",
        },
        "vision_end_token_id": END,
        "vision_start_token_id": START,
    },
}

# What is in a prompt, in order: ("sound", samples), ("picture", height, width), ("video", frames, height, width),
# ("film", frames, height, width, samples): a video with its audio track, whose tokens stand among those of its frames.
CASES = {
    # Less than a window of convolutions; a length that no hop divides.
    "short": [("sound", 5_000)],
    # More than one window of attention, and a rest.
    "long": [("sound", 3 * RATE + 4_321)],
    "picture": [("sound", 20_000), ("picture", 24, 40)],
    "video": [("picture", 16, 16), ("video", 4, 16, 8)],
    "all": [("video", 4, 16, 8), ("sound", 17_000), ("picture", 16, 16), ("sound", 16_000)],
    # The track is longer than the frames.
    "film": [("picture", 16, 16), ("film", 6, 16, 8, 40_000)],
    # One is shorter, and one as long; a sound of its own between them. None is shorter than a window of convolutions: beside a longer
    # one the reference would fill it up before it computes them.
    "films": [("film", 8, 16, 16, 17_000), ("sound", 16_000), ("film", 8, 8, 16, 52_000)],
}
# Seconds from one group of frames to the next: places that are no whole numbers.
SECONDS = {"films": 0.9}
USUAL_SECONDS = 0.35


def sound(seed: int, samples: int) -> np.ndarray:
    """Samples of a sound, 16 bits a sample: the formula of tests/common/played.rs."""
    i = np.arange(samples, dtype=np.int64)
    rising = (i * (i // 37 + 40 + seed)) % 16_001 - 8_000
    beating = (i * 911 + (i // 800) * seed * 733) % 4_001 - 2_000
    return (rising + beating).astype(np.int16)


def floats(samples: np.ndarray) -> np.ndarray:
    """As decoders give 16-bit samples."""
    return samples.astype(np.float32) / np.float32(32_768.0)


def extractor(bands: int) -> WhisperFeatureExtractor:
    """The published feature extractor, of so many bands."""
    return WhisperFeatureExtractor(
        feature_size=bands, sampling_rate=RATE, hop_length=160, n_fft=400, chunk_length=300, return_attention_mask=True
    )


def spectrogram(samples: np.ndarray, bands: int = BANDS) -> torch.Tensor:
    """What the processor makes of a sound: [bands, frames]."""
    made = extractor(bands)(
        [floats(samples)], sampling_rate=RATE, padding=True, truncation=False, return_attention_mask=True,
        return_tensors="pt",
    )
    return made["input_features"][0][:, made["attention_mask"][0].bool()]


def processors():
    """The image and the video processor, with bounds that leave the cases' sizes as they are."""
    common = {
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_size": 2, "patch_size": 4, "temporal_patch_size": 2,
    }
    image = {**common, "size": {"shortest_edge": 64, "longest_edge": 16384}}
    video = {**common, "size": {"shortest_edge": 64, "longest_edge": 65536}}
    return (image, Qwen2VLImageProcessor(**image)), (video, Qwen2VLVideoProcessor(**video, do_sample_frames=False))


def on_disk(model) -> dict[str, torch.Tensor]:
    """All tensors by their published names: a matrix for each expert."""
    out = {}
    for name, tensor in models.state(model).items():
        tensor = tensor.to(getattr(torch, DTYPE))
        name = name.replace("model.language_model.", "model.").replace("model.audio_tower.", "audio_tower.")
        name = "thinker." + name.replace("model.visual.", "visual.")
        if name.endswith(".experts.gate_up_proj"):
            stem, width = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
            for expert, both in enumerate(tensor):
                out[f"{stem}{expert}.gate_proj.weight"] = both[:width].contiguous()
                out[f"{stem}{expert}.up_proj.weight"] = both[width:].contiguous()
        elif name.endswith(".experts.down_proj"):
            for expert, own in enumerate(tensor):
                out[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = own.contiguous()
        else:
            out[name] = tensor.contiguous()
    return dict(sorted(out.items()))


@dataclass(frozen=True)
class Kind:
    """What differs among the families."""

    raw: dict
    text: dict
    model: type
    # Of samples and bands: [bands, frames].
    spectrogram: Callable
    # Placeholders of so many frames.
    tokens: Callable
    processor: type
    # Whether the words behind the last item are tokenized as one text, as those of a chat are.
    joined: bool = False


def _tokens(frames: int) -> int:
    return int(_get_feat_extract_output_lengths(torch.tensor(frames)))


OMNI = Kind(
    raw=RAW, text=TEXT, model=transformers.Qwen3OmniMoeThinkerForConditionalGeneration, spectrogram=spectrogram, tokens=_tokens,
    processor=Qwen3OmniMoeProcessor,
)


def seconds_of(name: str) -> float:
    """Of a case, from one group of frames to the next."""
    return SECONDS.get(name, USUAL_SECONDS)


def heard(of: Kind, seed: int, samples: int):
    """A sound's spectrogram, its tokens, and what a reference says of it."""
    values = of.spectrogram(sound(seed, samples), BANDS)
    frames = values.shape[1]
    return values, of.tokens(frames), {"kind": "sound", "seed": seed, "samples": samples, "frames": frames}


def interleaved(of: Kind, grid: list[int], seconds: float, tokens: int) -> list[int]:
    """What the processor writes for a video and its audio track of so many tokens."""
    kind = of.processor
    self = SimpleNamespace(
        audio_bos_token="(", audio_eos_token=")", video_token="v", audio_token="a",
        video_processor=SimpleNamespace(merge_size=2), get_chunked_index=partial(kind.get_chunked_index, None),
    )
    written = kind.replace_video_with_audio_token(
        self, {"video_grid_thw": [grid], "video_second_per_grid": [seconds]}, 0, {"num_audio_tokens": [tokens]}, 0,
        position_id_per_seconds=of.raw["thinker_config"]["position_id_per_seconds"], seconds_per_chunk=kind.seconds_per_chunk,
    )
    return [{"(": AUDIO_START, ")": AUDIO_END, "v": VIDEO, "a": AUDIO}[letter] for letter in written]


def items_of(of: Kind, name: str, seed: int):
    """A case's items for the reference, what the model is given, sampled values, and the prompt's ids for each item."""
    (_, image), (_, video) = processors()
    items, media, sampled, prompts, spectra = [], {}, [], [], []
    for i, (kind, *sizes) in enumerate(CASES[name]):
        own = seed + i
        if kind == "sound":
            values, tokens, more = heard(of, own, sizes[0])
            spectra.append(values)
            items.append(more)
            prompts.append([AUDIO_START] + [AUDIO] * tokens + [AUDIO_END])
            sampled += [reference.short(v) for v in values.T.flatten()[::PATCH_STEP]]
            continue
        track, kind = sizes[3:], "video" if kind == "film" else kind
        frames, height, width = sizes[:3] if kind == "video" else (1, *sizes)
        shots = np.stack([vision.picture(own, frame, height, width) for frame in range(frames)])
        shots = torch.from_numpy(shots).permute(0, 3, 1, 2)
        if kind == "video":
            made = video(videos=[shots], return_tensors="pt")
            keys, token = ("pixel_values_videos", "video_grid_thw"), VIDEO
        else:
            made = image(images=[shots[0]], return_tensors="pt")
            keys, token = ("pixel_values", "image_grid_thw"), IMAGE
        grid = made[keys[1]][0].tolist()
        assert grid == [max(1, frames // 2), height // 4, width // 4], grid
        for key in keys:
            media[key] = torch.cat([media[key], made[key]]) if key in media else made[key]
        items.append({"kind": kind, "seed": own, "frames": frames if kind == "video" else 0, "height": height,
                      "width": width, "grid": grid})
        words = [token] * (grid[0] * grid[1] * grid[2] // 4)
        sampled += [reference.short(v) for v in made[keys[0]].flatten()[::PATCH_STEP]]
        for samples in track:
            values, tokens, more = heard(of, own, samples)
            spectra.append(values)
            items.append({**more, "of_video": True})
            words = interleaved(of, grid, seconds_of(name), tokens)
            sampled += [reference.short(v) for v in values.T.flatten()[::PATCH_STEP]]
        prompts.append([START] + words + [END])
    if spectra:
        most = max(s.shape[1] for s in spectra)
        media["input_features"] = torch.stack([torch.nn.functional.pad(s, (0, most - s.shape[1])) for s in spectra])
        media["feature_attention_mask"] = torch.stack([(torch.arange(most) < s.shape[1]).long() for s in spectra])
    if "video_grid_thw" in media:
        media["video_second_per_grid"] = torch.tensor([seconds_of(name)] * len(media["video_grid_thw"]))
    if any("of_video" in item for item in items):
        media["use_audio_in_video"] = True
    return items, media, sampled, prompts, spectra


def run(model, ids: list[int], media: dict) -> torch.Tensor:
    """Logits of every position."""
    model.model.rope_deltas = None
    tokens = torch.tensor([ids])
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **media).logits[0].float()


@torch.no_grad()
def rows_of(model, items, media, spectra) -> list:
    """The encoders' output for one token of each item."""
    rows, first = [], 0
    seen = {"picture": 0, "video": 0, "sound": 0}
    for item in items:
        kind = item["kind"]
        if kind == "sound":
            values = spectra[seen[kind]]
            wide = model.model.audio_tower(values, feature_lens=torch.tensor([values.shape[1]])).last_hidden_state
            seen[kind] += 1
        else:
            grid = item["grid"]
            pixel = "pixel_values_videos" if kind == "video" else "pixel_values"
            count = grid[0] * grid[1] * grid[2]
            out = model.model.visual(media[pixel][seen[kind]:seen[kind] + count], grid_thw=torch.tensor([grid]))
            levels = [out.pooler_output, *getattr(out, "deepstack_features", [])]
            wide = torch.cat([level.reshape(count // 4, -1) for level in levels], dim=1)
            seen[kind] += count
        row = (3 * len(wide)) // 4
        rows.append([first + row, [reference.short(v) for v in wide[row]]])
        first += len(wide)
    return rows


@torch.no_grad()
def case(of: Kind, model, tokenizer, name: str, seed: int, tail: str) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie."""
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    items, media, sampled, prompts, spectra = items_of(of, name, seed)
    ids = encode("<|im_start|>user\n")
    between, rest = "Next to it ", f"{tail}<|im_end|>\n<|im_start|>assistant\n"
    for own in prompts[:-1]:
        ids += own + encode(between)
    ids += prompts[-1] + (encode(between + rest) if of.joined else encode(between) + encode(rest))
    path = vision.greedy_path(lambda said: run(model, ids + said, media)[-1])
    if path is None:
        return None
    tokens = torch.tensor([ids])
    lengths = media.get("feature_attention_mask")
    places, deltas = model.get_rope_index(
        tokens, media.get("image_grid_thw"), media.get("video_grid_thw"), torch.ones_like(tokens),
        media.get("use_audio_in_video", False),
        None if lengths is None else lengths.sum(-1), media.get("video_second_per_grid"),
    )
    return {
        "name": name, "items": items, "seconds": seconds_of(name), "ids": ids, "places": places[:, 0].T.tolist(),
        "next": len(ids) + float(deltas[0, 0]), "patches": sampled, "rows": rows_of(model, items, media, spectra),
        **path,
    }


def write_processors(of: Kind, folder) -> None:
    """preprocessor_config.json as the published one is: the image processor's and the feature extractor's in one; a video's apart."""
    (image, _), (video, kind) = processors()
    sounds = {
        "chunk_length": 300, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": BANDS,
        "hop_length": 160, "n_fft": 400, "n_samples": 4_800_000, "nb_max_frames": 30_000, "padding_side": "right",
        "padding_value": 0.0, "processor_class": of.processor.__name__, "return_attention_mask": True, "sampling_rate": RATE,
    }
    files = {
        "preprocessor_config": {**image, **sounds, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config": {**video, "video_processor_type": type(kind).__name__},
    }
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(dict(sorted(values.items())), indent=2) + "\n")


def build(of: Kind, seed: int):
    """The model with its weights."""
    thinker = of.raw["thinker_config"]
    config = transformers.AutoConfig.for_model(thinker["model_type"], **{k: v for k, v in thinker.items() if k != "model_type"})
    config._attn_implementation = "eager"
    model = of.model(config).float().eval()
    vision.fill(model, of.text, seed)
    return model


@torch.no_grad()
def make(folder, tokenizer, seed: int, of: Kind = OMNI) -> None:
    """The model with its reference."""
    from tokenizers import AddedToken, Tokenizer

    model = build(of, seed)
    checkpoint.fresh(folder)
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in EXTRA])
    assert extended.token_to_id(EXTRA[-1]) == AUDIO
    checkpoint.write_side_files(folder, {**of.raw, "text_config": of.text}, DTYPE, extended)
    (folder / "config.json").write_text(json.dumps({**of.raw, "transformers_version": "4.57.0"}, indent=2, sort_keys=True) + "\n")
    written = json.loads((folder / "tokenizer_config.json").read_text())
    written |= {"chat_template": CHAT_TEMPLATE, "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    for token in EXTRA:
        written["added_tokens_decoder"][str(extended.token_to_id(token))] = {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True,
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    write_processors(of, folder)
    checkpoint.write_tensors(folder, on_disk(model))
    loaded, info = of.model.from_pretrained(
        folder, config=model.config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    loaded = loaded.eval()
    for key, value in models.state(model).items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    write_reference(of, loaded, folder, extended)


@torch.no_grad()
def write_reference(of: Kind, model, folder, tokenizer) -> None:
    """A case of each kind with a clear greedy path, and what the feature extractor makes."""
    cases = []
    for name in CASES:
        for attempt in range(200):
            tail = vision.TAILS[attempt % 4]
            found = case(of, model, tokenizer, name, attempt * 11 + len(cases), tail)
            if found:
                cases.append(found)
                break
        else:
            raise RuntimeError(f"no clear greedy path: {name}")
    lengths = [201, 320, 799, 16_000, 16_159, 16_160, 17_437, 48_000, 123_456]
    count = lambda n: of.tokens(of.spectrogram(sound(1, n), BANDS).shape[1])  # noqa: E731
    mel = of.spectrogram(sound(5, 30_011), 128).T.flatten()
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32, eager"
    reference.dump(
        {
            "model": folder.name, "made_with": made_with, "cases": cases,
            "mel": {"seed": 5, "samples": 30_011, "values": [reference.short(v) for v in mel[::MEL_STEP]]},
            "lengths": [[n, count(n)] for n in lengths],
        },
        folder / "reference.json",
    )
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name:26} {size / 1000:7.0f} kB   {type(model).__name__}", flush=True)
