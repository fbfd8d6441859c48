"""A tiny model that only hears: a Qwen3-ASR, in the form of transformers.

Sounds are those of omni.py. `reference.json` holds `cases` as described in vision.py, without `pictures`: an `items` list has each sound's
`seed`, `samples` and `frames`. `patches` are every `PATCH_STEP`-th value of the spectrogram, frame by frame. `text` is the prompt as the
chat template writes it, `lengths` are placeholders that the processor writes for so many samples: [samples, tokens].
"""

import json

import torch
import transformers
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from . import checkpoint, models, omni, reference, vision
from . import tokenizer as tok

DTYPE = "bfloat16"
EXTRA = ["<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<asr_text>"]
START, END, AUDIO, TEXT_MARK = range(tok.VOCAB_SIZE, tok.VOCAB_SIZE + len(EXTRA))
NAMED = {"audio_bos_token": EXTRA[0], "audio_eos_token": EXTRA[1], "audio_token": EXTRA[2]}
# Texts of a system message go first, those of others nowhere, as in the published template.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(system='') %}{%- for message in messages if message['role'] == 'system' %}"
    "{%- if message['content'] is string %}{%- set ns.system = ns.system + message['content'] %}{%- else %}"
    "{%- for part in message['content'] %}{%- if 'text' in part %}{%- set ns.system = ns.system + part['text'] %}{%- endif %}"
    "{%- endfor %}{%- endif %}{%- endfor %}"
    "{{- '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n<|im_start|>user\\n' }}"
    "{%- for message in messages if message['role'] == 'user' and message['content'] is not string %}"
    "{%- for part in message['content'] %}{%- if part['type'] == 'audio' or 'audio' in part or 'audio_url' in part %}"
    "{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}{%- endif %}{%- endfor %}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- for message in messages if message['role'] == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' }}{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}{{- part['text'] }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
RAW = {
    "architectures": ["Qwen3ASRForConditionalGeneration"],
    "audio_config": {
        **{k: v for k, v in omni.AUDIO_TOWER.items() if k not in ("conv_chunksize", "max_source_positions")},
        "max_position_embeddings": 13, "model_type": "qwen3_asr_encoder", "output_dim": 40,
    },
    "audio_token_id": AUDIO,
    "eos_token_id": [models.EOS, models.EOS - 2],
    "model_type": "qwen3_asr",
    "text_config": {
        **vision.TEXT, "attention_bias": False, "head_dim": 16, "hidden_size": 40, "model_type": "qwen3", "num_hidden_layers": 3,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "vocab_size": tok.VOCAB_SIZE + len(EXTRA),
        "dtype": DTYPE,
    },
    "tie_word_embeddings": True,
}
MODELS = {"asr": RAW}
# Samples of each sound: filled up to half a second; less than two windows that attend to each other; more, and two in a prompt.
CASES = {"short": [5_000], "middle": [23_456], "long": [3 * omni.RATE + 4_321], "two": [17_000, 9_000]}


def extractor() -> Qwen3ASRFeatureExtractor:
    """The published feature extractor, of fewer bands."""
    return Qwen3ASRFeatureExtractor(feature_size=omni.BANDS)


def spectrogram(samples) -> tuple[torch.Tensor, torch.Tensor]:
    """What the processor makes of a sound, [1, bands, frames] to a multiple of a window, and which frames count."""
    made = extractor()(
        [omni.floats(samples)], sampling_rate=omni.RATE, padding=True, truncation=False, return_attention_mask=True,
        return_tensors="pt",
    )
    return made["input_features"], made["attention_mask"]


def tokens_of(mask: torch.Tensor) -> int:
    """Placeholders of a sound."""
    frames = int(mask.sum())
    return int(omni._get_feat_extract_output_lengths(torch.tensor(frames)))


def on_disk(model) -> dict[str, torch.Tensor]:
    """All tensors by their published names."""
    return {k: v.contiguous().to(getattr(torch, DTYPE)) for k, v in sorted(models.state(model).items())}


@torch.no_grad()
def case(model, tokenizer, lengths: tuple[str, list[int]], seed: int, language: str | None) -> dict | None:
    """One case, of its name and the samples of each sound; none if a choice on its greedy path is nearly a tie."""
    name, clips = lengths
    sounds = [spectrogram(omni.sound(seed + i, samples)) for i, samples in enumerate(clips)]
    counts = [tokens_of(mask) for _, mask in sounds]
    messages = [{"role": "user", "content": [{"type": "audio"} for _ in sounds]}]
    processor = transformers.AutoProcessor.from_pretrained(model.name_or_path)
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    text += f"language {language}<asr_text>" if language else ""
    ids = []
    pieces = text.split("<|audio_pad|>")
    for i, piece in enumerate(pieces):
        ids += tokenizer.encode(piece, add_special_tokens=False).ids + ([AUDIO] * counts[i] if i < len(counts) else [])
    if len(sounds) == 1:
        made = processor(text=[text], audio=[omni.floats(omni.sound(seed, clips[0]))], sampling_rate=omni.RATE)
        assert made["input_ids"][0].tolist() == ids, (made["input_ids"][0].tolist(), ids)
    most = max(values.shape[2] for values, _ in sounds)
    pad = lambda x: torch.nn.functional.pad(x, (0, most - x.shape[-1]))  # noqa: E731
    media = {
        "input_features": torch.cat([pad(values) for values, _ in sounds]),
        "input_features_mask": torch.cat([pad(mask) for _, mask in sounds]),
    }
    path = vision.greedy_path(lambda said: model(input_ids=torch.tensor([ids + said]), use_cache=False, **media).logits[0, -1].float())
    if path is None:
        return None
    sampled, rows, first = [], [], 0
    for (values, mask), count in zip(sounds, counts):
        frames = int(mask.sum())
        sampled += [reference.short(v) for v in values[0, :, :frames].T.flatten()[::omni.PATCH_STEP]]
        wide = model.model.get_audio_features(values, mask).pooler_output
        assert len(wide) == count, (len(wide), count)
        row = (3 * count) // 4
        rows.append([first + row, [reference.short(v) for v in wide[row]]])
        first += count
    items = [
        {"kind": "sound", "seed": seed + i, "samples": samples, "frames": int(mask.sum())}
        for i, (samples, (_, mask)) in enumerate(zip(clips, sounds))
    ]
    return {"name": name, "items": items, "seconds": 1.0, "text": text, "ids": ids, "patches": sampled, "rows": rows, **path}


def build(raw: dict, seed: int):
    """The model with its weights."""
    config = transformers.AutoConfig.for_model("qwen3_asr", **{k: v for k, v in raw.items() if k != "model_type"})
    config._attn_implementation = "eager"
    model = transformers.Qwen3ASRForConditionalGeneration(config).float().eval()
    vision.fill(model, raw["text_config"], seed)
    return model


def with_tokens(tokenizer):
    """The tokenizer with the tokens of the family."""
    from tokenizers import AddedToken, Tokenizer

    extended = Tokenizer.from_str(tokenizer.to_str())
    # The mark between language and text is no special token.
    extended.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in EXTRA[:3]])
    extended.add_tokens([AddedToken(EXTRA[3], normalized=False, special=False)])
    assert extended.token_to_id(EXTRA[-1]) == TEXT_MARK
    return extended


@torch.no_grad()
def make(name: str, folder, tokenizer, seed: int) -> None:
    """The model with its reference."""
    model, extended = build(RAW, seed), with_tokens(tokenizer)
    checkpoint.fresh(folder)
    checkpoint.write_side_files(folder, RAW, DTYPE, extended)
    written = json.loads((folder / "tokenizer_config.json").read_text())
    written |= {"chat_template": CHAT_TEMPLATE, "extra_special_tokens": NAMED}
    for token in EXTRA:
        written["added_tokens_decoder"][str(extended.token_to_id(token))] = {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": token != EXTRA[3],
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    values = {"feature_extractor": extractor().to_dict(), "processor_class": "Qwen3ASRProcessor", "timestamp_segment_time": 80}
    values["feature_extractor"] = {k: v for k, v in values["feature_extractor"].items() if k != "mel_filters"}
    (folder / "processor_config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    checkpoint.write_tensors(folder, on_disk(model))
    loaded, info = transformers.Qwen3ASRForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    loaded = loaded.eval()
    for key, value in models.state(model).items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    write_reference(loaded, folder, extended, CASES)


@torch.no_grad()
def write_reference(model, folder, tokenizer, kinds: dict[str, list[int]]) -> None:
    """A case of each kind with a clear greedy path, and how many tokens clips have."""
    cases = []
    for kind in kinds.items():
        for attempt in range(200):
            found = case(model, tokenizer, kind, attempt * 11 + len(cases), "English" if kind[0] == "middle" else None)
            if found:
                cases.append(found)
                break
        else:
            raise RuntimeError(f"no clear greedy path: {kind[0]}")
    lengths = [[n, tokens_of(spectrogram(omni.sound(1, n))[1])] for n in [201, 7_999, 8_000, 8_160, 16_000, 17_437, 123_456]]
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32, eager"
    reference.dump(
        {"model": folder.name, "made_with": made_with, "cases": cases, "lengths": lengths}, folder / "reference.json",
    )
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name:26} {size / 1000:7.0f} kB   {type(model).__name__}", flush=True)
