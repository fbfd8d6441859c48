"""Gemma 4 Unified, which has no encoders: a token is the patch of an image, or some samples of a sound, through a projection.

`vl-gemma4-unified` is asked about pictures, with cases as in budget.py; `vl-gemma4-unified-audio` is the same model asked about sounds,
with cases as in conformer.py.
"""

import functools
import json

import torch
import transformers
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor
from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor
from transformers.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedProcessor
from transformers.models.gemma4_unified.video_processing_gemma4_unified import Gemma4UnifiedVideoProcessor

from . import budget, conformer, gemma4, omni, reference, vision

# Samples of a token.
SAMPLES = 160
SIDE = budget.PATCH * budget.POOL
TEXT = conformer.RAW["text_config"]
RAW = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "audio_config": {"audio_embed_dim": SAMPLES, "model_type": "gemma4_unified_audio", "rms_norm_eps": 1e-6},
    **{key: conformer.RAW[key] for key in conformer.RAW if key.endswith(("_id", "_index"))},
    "model_type": "gemma4_unified",
    "text_config": {
        **{
            k: v for k, v in TEXT.items()
            if k not in ("enable_moe_block", "hidden_size_per_layer_input", "moe_intermediate_size", "num_experts", "top_k_experts",
                         "vocab_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
        },
        "attention_k_eq_v": True, "layer_types": [gemma4.SLIDING, gemma4.SLIDING, gemma4.FULL] * 2, "model_type": "gemma4_unified_text",
        "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "mm_embed_dim": 40, "mm_posemb_size": 72, "model_type": "gemma4_unified_vision", "output_proj_dims": 40,
        "patch_size": budget.PATCH, "pooling_kernel_size": budget.POOL, "rms_norm_eps": 1e-6,
    },
}
SEES, HEARS = "vl-gemma4-unified", "vl-gemma4-unified-audio"
MODELS = {SEES: RAW, HEARS: RAW}


def processors(raw: dict):
    """The image and the video processor."""
    (image, _), (video, _) = budget.processors(raw)
    own = {k: v for k, v in image.items() if k != "image_seq_length"}
    return (image, Gemma4UnifiedImageProcessor(**own)), (video, Gemma4UnifiedVideoProcessor(**video))


def extractor() -> Gemma4UnifiedAudioFeatureExtractor:
    """The published feature extractor, of fewer samples."""
    return Gemma4UnifiedAudioFeatureExtractor(feature_size=SAMPLES, audio_samples_per_token=SAMPLES)


def processor_of(folder) -> Gemma4UnifiedProcessor:
    """The processor of the files."""
    made = Gemma4UnifiedProcessor(
        feature_extractor=extractor(), image_processor=Gemma4UnifiedImageProcessor.from_pretrained(folder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        video_processor=Gemma4UnifiedVideoProcessor.from_pretrained(folder, do_sample_frames=False), image_seq_length=budget.BUDGET,
    )
    return conformer.hearing(made, extractor())


def colours_first(values: torch.Tensor, _places: torch.Tensor) -> torch.Tensor:
    """The patches of one picture, colours before points."""
    return values.reshape(len(values), SIDE, SIDE, 3).permute(0, 3, 1, 2).flatten()


def masks(model, ids: list[int], kinds: list[int]) -> dict:
    """The masks of `generate`. A forward pass of transformers 5.24 without them lets pictures see ahead in global layers too."""
    embeds = model.get_input_embeddings()(torch.tensor([ids]))
    made = model.create_masks_for_generate(
        config=model.config, inputs_embeds=embeds, attention_mask=None, cache=None, position_ids=torch.arange(len(ids))[None],
        mm_token_type_ids=torch.tensor([kinds]),
    )
    return {"attention_mask": made}


def tokens_of(mask: torch.Tensor) -> int:
    """Placeholders of a sound."""
    return int(mask.sum())


def make(name: str, folder, tokenizer, seed: int) -> None:
    """The model with its reference."""
    ask = {
        SEES: (budget.CASES, functools.partial(budget.case, own=(processor_of, colours_first, 1, masks))),
        HEARS: (conformer.CASES, functools.partial(conformer.case, own=(processor_of, tokens_of))),
    }
    vision.write(name, RAW, folder, tokenizer, seed, conformer.EXTRA, conformer.NAMED, conformer.CHAT_TEMPLATE, processors, *ask[name])
    outer = {"feature_extractor": json.loads(extractor().to_json_string()), "processor_class": "Gemma4UnifiedProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(outer, indent=2, sort_keys=True) + "\n")
    if name == HEARS:
        made = json.loads((folder / "reference.json").read_text())
        made["lengths"] = [
            [n, tokens_of(conformer.heard(omni.sound(1, n), extractor())[1])] for n in [1, 159, 160, 161, 16_000, 17_437]
        ]
        reference.dump(made, folder / "reference.json")
