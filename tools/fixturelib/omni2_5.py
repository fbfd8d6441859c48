"""A tiny Qwen2.5-Omni: its thinker, named on disk as the published checkpoint is. Cases and reference are those of omni.py.

The feature extractor fills a sound up with silence to `chunk_length` seconds and drops the frames of silence alone, so the last frames
hear silence, not a mirror image.
"""

import torch
import transformers
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor, _get_feat_extract_output_lengths

from . import models, omni, vision
from . import tokenizer as tok

TEXT = {
    **vision.QWEN2, "model_type": "qwen2_5_omni_text", "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
    "tie_word_embeddings": False, "vocab_size": tok.VOCAB_SIZE + len(omni.EXTRA), "dtype": omni.DTYPE,
}
# Chunks of an odd number of rows: a token's two rows may be of two chunks. The bands are no power of two.
AUDIO_TOWER = {
    "activation_function": "gelu", "d_model": 24, "encoder_attention_heads": 2, "encoder_ffn_dim": 40, "encoder_layers": 2,
    "max_source_positions": 30, "model_type": "qwen2_5_omni_audio_encoder", "n_window": 25, "num_mel_bins": omni.BANDS,
    "output_dim": 32, "scale_embedding": False,
}
RAW = {
    "architectures": ["Qwen2_5OmniModel"],
    "enable_audio_output": False,
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "audio_config": AUDIO_TOWER,
        "audio_end_token_id": omni.AUDIO_END,
        "audio_start_token_id": omni.AUDIO_START,
        "audio_token_index": omni.AUDIO,
        "dtype": omni.DTYPE,
        "eos_token_id": models.EOS,
        "image_token_index": omni.IMAGE,
        "model_type": "qwen2_5_omni_thinker",
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "text_config": TEXT,
        "video_token_index": omni.VIDEO,
        "vision_config": {
            **vision.TOWER, "fullatt_block_indexes": [1], "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 40,
            "model_type": "qwen2_5_omni_vision_encoder", "out_hidden_size": 32, "window_size": 16,
        },
        "vision_end_token_id": omni.END,
        "vision_start_token_id": omni.START,
    },
}


def spectrogram(samples, bands: int) -> torch.Tensor:
    """What the processor makes of a sound: [bands, frames]."""
    made = omni.extractor(bands)(
        [omni.floats(samples)], sampling_rate=omni.RATE, padding="max_length", return_attention_mask=True, return_tensors="pt",
    )
    return made["input_features"][0][:, made["attention_mask"][0].bool()]


KIND = omni.Kind(
    raw=RAW, text=TEXT, model=transformers.Qwen2_5OmniThinkerForConditionalGeneration, spectrogram=spectrogram,
    tokens=lambda frames: int(_get_feat_extract_output_lengths(torch.tensor(frames))), processor=Qwen2_5OmniProcessor,
    joined=True,
)


def make(folder, tokenizer, seed: int) -> None:
    """The model with its reference."""
    omni.make(folder, tokenizer, seed, KIND)
