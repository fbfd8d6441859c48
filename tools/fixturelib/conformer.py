"""Gemma 4 with both its encoders, asked about sounds.

Sounds are those of omni.py, `cases` as in asr.py. The prompts are made by the processor of the files itself. `mel` holds the published
feature extractor's numbers for a sound (128 bands): every `MEL_STEP`-th value. `lengths` are placeholders for so many samples:
[samples, tokens].
"""

import json

import torch
import transformers
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from . import budget, gemma4, omni, reference, vision

EXTRA = [*budget.EXTRA, "<|audio>", "<audio|>", "<|audio|>"]
AUDIO = vision.START + len(EXTRA) - 1
NAMED = {**budget.NAMED, "audio_token": EXTRA[6], "boa_token": EXTRA[4], "eoa_token": EXTRA[5]}
CHAT_TEMPLATE = budget.CHAT_TEMPLATE.replace(
    "{% elif part['type'] == 'text' %}", "{% elif part['type'] == 'audio' %}{{ '<|audio|>' }}{% elif part['type'] == 'text' %}"
)
assert "<|audio|>" in CHAT_TEMPLATE

BANDS = 16
RAW = budget.outer({**gemma4.E2B, "hidden_size_per_layer_input": 16}, standardize=False, use_clipped_linears=True)
RAW["text_config"] |= {key: RAW["text_config"]["vocab_size"] + 3 for key in ("vocab_size", "vocab_size_per_layer_input")}
RAW |= {
    # A row sees five rows. Scores and residual sums reach their bounds.
    "audio_config": {
        "attention_chunk_size": 5, "attention_context_left": 6, "attention_context_right": 0, "attention_logit_cap": 3.0,
        "conv_kernel_size": 4, "gradient_clipping": 5.0, "hidden_act": "silu", "hidden_size": 24, "model_type": "gemma4_audio",
        "num_attention_heads": 2, "num_hidden_layers": 2, "output_proj_dims": 28, "residual_weight": 0.5, "rms_norm_eps": 1e-6,
        "subsampling_conv_channels": [BANDS, 6], "use_clipped_linears": True,
    },
    "audio_token_id": AUDIO,
    "boa_token_id": AUDIO - 2,
    "eoa_token_index": AUDIO - 1,
}
MODELS = {"vl-gemma4-audio": RAW}
# What a GGUF file can express: the constants of published models.
IN_FILE = {
    "vl-gemma4-audio": {
        **RAW,
        "audio_config": {
            **RAW["audio_config"], "attention_chunk_size": 12, "attention_context_left": 13, "attention_logit_cap": 50.0,
            "conv_kernel_size": 5, "gradient_clipping": 1e10,
        },
    },
}
# Samples of each sound: two frames; less than a row sees; more rows than are convolved together, and a rest; two in a prompt.
CASES = {"short": [400], "middle": [2_345], "long": [3 * omni.RATE + 4_321], "two": [17_000, 9_000]}


def extractor(bands: int = BANDS) -> Gemma4AudioFeatureExtractor:
    """The published feature extractor, of so many bands."""
    return Gemma4AudioFeatureExtractor(feature_size=bands)


def hearing(processor, own_extractor):
    """The processor with what it needs for sounds."""
    processor.feature_extractor = own_extractor
    processor.boa_token, processor.eoa_token = EXTRA[4], EXTRA[5]
    return processor


def processor_of(folder):
    """The processor of the files."""
    return hearing(budget.whole_processor(folder), extractor())


def heard(samples, own_extractor=None) -> tuple[torch.Tensor, torch.Tensor]:
    """A sound's spectrogram, [1, frames, bands], and which frames count."""
    made = (own_extractor or extractor())([omni.floats(samples)], sampling_rate=omni.RATE, return_tensors="pt")
    return made["input_features"], made["input_features_mask"]


def tokens_of(mask: torch.Tensor) -> int:
    """Placeholders of a sound."""
    return int(mask[0, ::2][::2].sum())


@torch.no_grad()
def case(model, _head, _raw: dict, _tokenizer, name: str, seed: int, tail: str, own=(processor_of, tokens_of)) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie. `own`: the processor, and how many tokens a sound has."""
    made_of, counted = own
    processor = made_of(model.name_or_path)
    sounds = [omni.sound(seed + i, samples) for i, samples in enumerate(CASES[name])]
    messages = [{"role": "user", "content": [*({"type": "audio"} for _ in sounds), {"type": "text", "text": tail}]}]
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    made = processor(text=[text], audio=[omni.floats(sound) for sound in sounds], sampling_rate=omni.RATE, return_tensors="pt")
    ids = made["input_ids"][0].tolist()
    given = {key: made[key] for key in ("input_features", "input_features_mask")}
    kinds = lambda ids: [3 * int(i == AUDIO) for i in ids]  # noqa: E731
    assert made["mm_token_type_ids"][0].tolist() == kinds(ids)
    after = lambda said: model(  # noqa: E731
        input_ids=torch.tensor([ids + said]), mm_token_type_ids=torch.tensor([kinds(ids + said)]), use_cache=False, **given,
    ).logits[0, -1].float()
    path = vision.greedy_path(after)
    if path is None:
        return None
    items, sampled, rows, first = [], [], [], 0
    for i, sound in enumerate(sounds):
        values, mask = heard(sound, processor.feature_extractor)
        frames, count = int(mask.sum()), counted(mask)
        sampled += [reference.short(v) for v in values[0, :frames].flatten()[::omni.PATCH_STEP]]
        out = model.model.get_audio_features(values, mask)
        wide = out.pooler_output[out.attention_mask]
        assert len(wide) == count and ids.count(AUDIO) >= count
        for row in sorted({0, count // 2, count - 1}):
            rows.append([first + row, [reference.short(v) for v in wide[row]]])
        items.append({"kind": "sound", "seed": seed + i, "samples": len(sound), "frames": frames})
        first += count
    assert first == ids.count(AUDIO)
    return {"name": name, "items": items, "seconds": 1.0, "text": text, "ids": ids, "patches": sampled, "rows": rows, **path}


def make(name: str, folder, tokenizer, seed: int) -> None:
    """The model with its reference."""
    vision.write(name, MODELS[name], folder, tokenizer, seed, EXTRA, NAMED, CHAT_TEMPLATE, budget.processors, CASES, case)
    values = {k: v for k, v in json.loads(extractor().to_json_string()).items() if k not in ("mel_filters", "window")}
    outer = {"feature_extractor": values, "processor_class": "Gemma4Processor"}
    (folder / "processor_config.json").write_text(json.dumps(outer, indent=2, sort_keys=True) + "\n")
    made = json.loads((folder / "reference.json").read_text())
    made["lengths"] = [
        [n, tokens_of(heard(omni.sound(1, n))[1])] for n in [161, 320, 321, 800, 801, 16_000, 17_437, 123_456, 30 * omni.RATE]
    ]
    samples = 40_000
    values, mask = heard(omni.sound(7, samples), extractor(128))
    mel = [reference.short(v) for v in values[0, : int(mask.sum())].flatten()[:: omni.MEL_STEP]]
    made["mel"] = {"samples": samples, "seed": 7, "values": mel}
    reference.dump(made, folder / "reference.json")
