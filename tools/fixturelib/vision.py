"""Tiny models that see: the Qwens with their encoders, named on disk as the published checkpoints are.

Pictures are made by `picture`, a formula that a test repeats, so that no pixel is stored. `reference.json` holds `cases`, each with
its `pictures` (`seed`, `frames` (0: a picture, not a video), `height`, `width`), their `grids` in patches, the prompt's `ids`,
every token's `places` (time, height, width) and the place `next` after the prompt, some values of the processor's `patches` (every
`PATCH_STEP`-th), the encoder's output for some tokens (`rows`: [token, values], deepstack levels side by side), the `top5`
of the first token, and `greedy` with its `greedy_logprobs`. Transformers computes all of it in float32 from the files.

InternVL is in tiled.py, Gemma 3 in siglip.py, Mistral 3 in pixtral.py, Idefics3 in idefics3.py, LFM2-VL in lfm2_vl.py, Gemma 4 in budget.py.

The draft head of vl-qwen3.5 (as in hybrid.py) sees the embedding of the next token, which may be a picture's, at its own row's place:
`mtp` holds its choice for every position (-1 where that is nearly a tie) and the `top5` at the last.
"""

import json
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from . import checkpoint, gemma4_tensors, hybrid, models, qwen4, reference
from . import tokenizer as tok

DTYPE = "bfloat16"
GREEDY = 12
PATCH_STEP = 131
EXTRA = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
START, END, IMAGE, VIDEO = range(tok.VOCAB_SIZE, tok.VOCAB_SIZE + len(EXTRA))
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' or 'video' in part %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

TEXT = {
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": models.EOS,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": tok.VOCAB_SIZE + len(EXTRA),
}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
TOWER = {"depth": 2, "in_channels": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_TOWER = {
    **TOWER, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 48, "num_position_embeddings": 36, "out_hidden_size": 32,
}
HYBRID = {
    **TEXT,
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 16,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        "rope_type": "default",
    },
}
MROPE3 = {
    "mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_theta": 10000.0, "rope_type": "default",
}
QWEN2 = {**TEXT, "rope_theta": 10000.0, "rope_scaling": {"mrope_section": [2, 3, 3], "type": "mrope"}, "use_sliding_window": False}


def outer(kind: str, architecture: str, text: dict, encoder: dict) -> dict:
    """A composite configuration."""
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": {**text, "model_type": f"{kind}_text", "dtype": DTYPE},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {**encoder, "model_type": kind},
        **TOKENS,
    }


def flat(kind: str, architecture: str, text: dict, encoder: dict) -> dict:
    """A configuration with the text model's keys on top, as Qwen2-VL's."""
    return {
        "architectures": [architecture], "model_type": kind, **text, "torch_dtype": DTYPE,
        "vision_config": {**encoder, "model_type": kind}, **TOKENS,
    }


MODELS: dict[str, dict] = {
    # Heads of 24 and of 12 elements: no multiples of sixteen.
    "vl-qwen3.5": outer(
        "qwen3_5", "Qwen3_5ForConditionalGeneration", HYBRID, {**QWEN3_TOWER, "hidden_size": 24, "num_heads": 1},
    ),
    "vl-qwen3.5-moe": outer(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",
        {**{k: v for k, v in HYBRID.items() if k != "intermediate_size"}, **MOE, "mtp_num_hidden_layers": 0,
         "shared_expert_intermediate_size": 16},
        {**QWEN3_TOWER, "hidden_size": 24},
    ),
    "vl-qwen4-exp": outer(
        "qwen4_exp", "Qwen4ExpForConditionalGeneration",
        {**{k: v for k, v in HYBRID.items() if k != "intermediate_size" and not k.startswith("mtp_")}, **MOE, **qwen4.SEEING},
        {**QWEN3_TOWER, "hidden_size": 24},
    ),
    "vl-qwen3": outer(
        "qwen3_vl", "Qwen3VLForConditionalGeneration",
        {**TEXT, "attention_bias": False, "head_dim": 32, "num_hidden_layers": 3, "rope_scaling": MROPE3,
         "rope_theta": 10000.0},
        {**QWEN3_TOWER, "hidden_size": 24, "deepstack_visual_indexes": [0, 1]},
    ),
    "vl-qwen3-moe": outer(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
        # Not square, or nobody could tell how experts lie.
        {**TEXT, **MOE, "attention_bias": False, "decoder_sparse_step": 1, "moe_intermediate_size": 24, "head_dim": 32, "mlp_only_layers": [],
         "norm_topk_prob": True, "rope_scaling": MROPE3, "rope_theta": 10000.0},
        {**QWEN3_TOWER, "hidden_size": 24, "deepstack_visual_indexes": [1]},
    ),
    "vl-qwen2.5": flat(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", QWEN2,
        {**TOWER, "fullatt_block_indexes": [1], "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 40,
         "out_hidden_size": 32, "tokens_per_second": 3, "window_size": 16},
    ),
    "vl-qwen2": flat(
        "qwen2_vl", "Qwen2VLForConditionalGeneration", QWEN2,
        {**TOWER, "embed_dim": 32, "hidden_act": "quick_gelu", "hidden_size": 32, "mlp_ratio": 2},
    ),
}

# name → (frames (0: a picture), height, width) of each item, in prompt order.
CASES = {
    "one": [(0, 24, 40)],
    "two": [(0, 40, 16), (0, 8, 8)],
    "video": [(4, 16, 24)],
    "both": [(0, 16, 16), (4, 16, 8)],
}

def picture(seed: int, frame: int, height: int, width: int) -> np.ndarray:
    """Bytes of a picture, [height, width, 3]: the formula of crates/plimsoll-models/tests/families/vision.rs."""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    return (((x * 13 + y * 7 + c * 50 + frame * 31 + seed * 97) ^ (x * y * 3 + seed * 5)) & 255).astype(np.uint8)


def later(raw: dict) -> bool:
    """Qwen3-VL and after: learned positions, frames with their times between."""
    return raw["model_type"].startswith(("qwen3", "qwen4"))


def processors(raw: dict):
    """The image and the video processor, with bounds that leave the cases' sizes as they are."""
    vision = raw["vision_config"]
    patch = {"patch_size": vision["patch_size"], "merge_size": 2, "temporal_patch_size": 2}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if later(raw) else {}
    image = {**patch, **half, "size": {"shortest_edge": 64, "longest_edge": 16384}}
    video = {**patch, **half, "size": {"shortest_edge": 64, "longest_edge": 65536}}
    kind = Qwen3VLVideoProcessor if later(raw) else Qwen2VLVideoProcessor
    return (image, Qwen2VLImageProcessor(**image)), (video, kind(**video, do_sample_frames=False))


# Processors around image processors that are told how many tokens a picture has, and where a configuration says it.
AROUND = {
    "internvl": ("image_seq_length", "InternVLProcessor"), "gemma3": ("mm_tokens_per_image", "Gemma3Processor"),
    "lfm2_vl": (None, "Lfm2VlProcessor"), "smolvlm": ("image_seq_len", "Idefics3Processor"),
    "idefics3": ("image_seq_len", "Idefics3Processor"), "mistral3": ("spatial_merge_size", "PixtralProcessor"),
    "llama4": (None, "Llama4Processor"),
}
TOWERS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.", "embed_vision.", "embed_audio.", "audio_tower.")
# Families whose text model is known by its own `model_type`, and whose state dictionary has the published names.
OWN_NAMES = ("gemma4", "gemma4_unified")


LEARNED = ("position_embeddings", "cls_token", "position_embedding_table", "pos_embedding")


def fill(model, text: dict, seed: int) -> None:
    """Weights a bfloat16 file can hold, of which every one matters; `text` says what those of the language model are."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in TOWERS):
                noise = models._normal(seed, name, parameter.shape)
                owner, last = name.split(".")[-2:]
                if last == "bias":
                    value = 0.3 * noise
                elif parameter.dim() == 1:
                    value = 1.0 + 0.2 * noise
                elif owner in ("pos_embed", "position_embedding") or last in LEARNED:
                    value = 0.7 * noise
                else:
                    value = 1.3 / np.sqrt(np.prod(parameter.shape[1:])) * noise
            else:
                value = models._tensor(seed, text, name, parameter.shape)
            value = torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))
            parameter.copy_(value.to(getattr(torch, DTYPE)).float())


def draft_head(raw: dict, model, seed: int):
    """The draft head of a model that has one."""
    text = raw.get("text_config", raw)
    if not text.get("mtp_num_hidden_layers"):
        return None
    head = hybrid.MtpHead(text, SimpleNamespace(config=model.config.text_config)).eval()
    models.randomise(head, {**text, "model_type": raw["model_type"]}, seed + 1, DTYPE)
    return head


def drafts(model, head, ids: list[int], following: int, media: dict, places: torch.Tensor) -> dict:
    """What the head says at every position of a prompt with one picture."""
    kinds = torch.tensor([[int(i == IMAGE) for i in ids]])
    model.model.rope_deltas = None
    hidden = model.model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, use_cache=False, **media).last_hidden_state
    shifted = torch.tensor([ids[1:] + [following]])
    embedded = model.model.language_model.embed_tokens(shifted)
    features = model.model.visual(media["pixel_values"], grid_thw=media["image_grid_thw"]).pooler_output
    embedded = embedded.masked_scatter((shifted == IMAGE)[..., None], features)
    joined = torch.cat([head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)], dim=-1)
    rotary = model.model.language_model.rotary_emb(joined, places)
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
    out = head.layers[0](
        head.fc(joined), position_embeddings=rotary, attention_mask=mask, position_ids=places[0], past_key_values=None
    )
    logits = model.lm_head(head.norm(out[0] if isinstance(out, tuple) else out))[0]
    best = logits.topk(2, dim=-1)
    lead = best.values[:, 0] - best.values[:, 1]
    top = torch.log_softmax(logits[-1], dim=-1).topk(5)
    return {
        "argmax": [int(i) if float(by) > 0.01 else -1 for i, by in zip(best.indices[:, 0], lead)],
        "top5": [[int(i), reference.short(v)] for v, i in zip(top.values, top.indices)],
    }


def on_disk(raw: dict, model, head) -> dict[str, torch.Tensor]:
    """All tensors by their published names."""
    if raw["model_type"] == "qwen4_exp":
        return qwen4.in_parts(raw["text_config"], models.state(model))
    out = {} if head is None else {f"mtp.{k}": v.to(getattr(torch, DTYPE)) for k, v in head.state_dict().items()}
    for name, tensor in models.state(model).items():
        if raw["model_type"] in ("internvl", "gemma3", "mistral3"):
            name = name.removeprefix("model.").replace("language_model.", "language_model.model.")
            name = f"language_model.{name}" if name.startswith("lm_head.") else name
            name = name.replace("vision_tower.", "vision_tower.vision_model.") if raw["model_type"] == "gemma3" else name
        elif raw["model_type"] == "lfm2_vl":
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        elif not later(raw) and raw["model_type"] not in OWN_NAMES:
            name = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        if raw["model_type"] == "qwen3_vl_moe" and name.endswith((".gate_up_proj", ".down_proj")) and "experts" in name:
            # Published with the input first.
            tensor = tensor.transpose(1, 2)
        out[name] = tensor.contiguous().to(getattr(torch, DTYPE))
    return dict(sorted(out.items()))


def prompt(raw: dict, tokenizer, items, grids, tail: str) -> list[int]:
    """A user's turn of media and text."""
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    ids = encode("<|im_start|>user\n")
    for (frames, _, _), (groups, height, width) in zip(items, grids):
        plane = height * width // 4
        if frames == 0:
            ids += [START] + [IMAGE] * plane + [END]
        elif later(raw):
            for group in range(groups):
                ids += encode(f"<{group + 0.5:.1f} seconds>") + [START] + [VIDEO] * plane + [END]
        else:
            ids += [START] + [VIDEO] * (groups * plane) + [END]
        ids += encode("Next to it ")
    return ids + encode(f"{tail}<|im_end|>\n<|im_start|>assistant\n")


def run(model, raw: dict, ids: list[int], media: dict) -> torch.Tensor:
    """Logits of every position."""
    kinds = torch.tensor([[1 if i == IMAGE else 2 if i == VIDEO else 0 for i in ids]])
    model.model.rope_deltas = None
    return model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, use_cache=False, **media).logits[0].float()


def greedy_path(logits_after) -> dict | None:
    """The greedy answer and the first token's rivals, given what computes the logits after tokens; none if a choice is nearly a tie."""
    greedy, lps, top = [], [], []
    while len(greedy) < GREEDY:
        logits = logits_after(greedy)
        best = logits.topk(2)
        if float(best.values[0] - best.values[1]) < reference.MARGIN or int(best.indices[0]) >= tok.VOCAB_SIZE - 3:
            return None
        lp = torch.log_softmax(logits, dim=-1)
        if not greedy:
            top = [[int(i), reference.short(lp[i])] for i in lp.topk(5).indices]
        greedy.append(int(best.indices[0]))
        lps.append(reference.short(lp[greedy[-1]]))
    return {"top5": top, "greedy": greedy, "greedy_logprobs": lps}


def asked(model, items: list, seed: int, tail: str, made_by=None):
    """The prompt with these pictures as the chat template writes it, its ids, and what the processor of the model's files makes of both.
    `made_by`: an image processor other than the files'."""
    processor = transformers.AutoProcessor.from_pretrained(model.name_or_path)
    processor.image_processor = made_by or processor.image_processor
    shots = [torch.from_numpy(picture(seed + i, 0, h, w)).permute(2, 0, 1) for i, (_, h, w) in enumerate(items)]
    parts = [{"type": "image"} for _ in items]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": tail}]}]
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    made = processor(text=[text], images=[shots], return_tensors="pt")
    return text, made["input_ids"][0].tolist(), made


def case(
    model, head, raw: dict, tokenizer, name: str, seed: int, tail: str, items=None, made_by=None,
) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie."""
    items = items or CASES[name]
    (_, image), (_, video) = made_by or processors(raw)
    pictures, grids, media, sampled = [], [], {}, []
    for i, (frames, height, width) in enumerate(items):
        pictures.append({"seed": seed + i, "frames": frames, "height": height, "width": width})
        shots = [picture(seed + i, frame, height, width) for frame in range(max(frames, 1))]
        shots = torch.from_numpy(np.stack(shots)).permute(0, 3, 1, 2)
        if frames:
            made, kind = video(videos=[shots], return_tensors="pt"), "video"
            values, grid = made["pixel_values_videos"], made["video_grid_thw"]
            keys = ("pixel_values_videos", "video_grid_thw")
        else:
            made, kind = image(images=[shots[0]], return_tensors="pt"), "image"
            values, grid = made["pixel_values"], made["image_grid_thw"]
            keys = ("pixel_values", "image_grid_thw")
        assert grid.tolist() == [[max(1, frames // 2), height // 4, width // 4]], (kind, grid)
        grids.append(grid[0].tolist())
        sampled += [reference.short(v) for v in values.flatten()[::PATCH_STEP]]
        for key, value in zip(keys, (values, grid)):
            media[key] = torch.cat([media[key], value]) if key in media else value
    spaced = {"second_per_grid_ts": torch.tensor([1.5] * sum(f > 0 for f, _, _ in items))}
    spaced = spaced if raw["model_type"] == "qwen2_5_vl" and any(f for f, _, _ in items) else {}
    ids = prompt(raw, tokenizer, items, grids, tail)
    path = greedy_path(lambda said: run(model, raw, ids + said, {**media, **spaced})[-1])
    if path is None:
        return None
    kinds = torch.tensor([[1 if i == IMAGE else 2 if i == VIDEO else 0 for i in ids]])
    grid_keys = {k: v for k, v in media.items() if k.endswith("grid_thw")}
    places, deltas = model.model.get_rope_index(torch.tensor([ids]), mm_token_type_ids=kinds, **grid_keys, **spaced)
    rows, first = [], 0
    for (frames, _, _), grid in zip(items, grids):
        count = grid[0] * grid[1] * grid[2] // 4
        pixel = "pixel_values_videos" if frames else "pixel_values"
        grid_key = "video_grid_thw" if frames else "image_grid_thw"
        before = sum(g[0] * g[1] * g[2] for (f, _, _), g in zip(items[: len(rows)], grids) if bool(f) == bool(frames))
        values = media[pixel][before:before + 4 * count]
        out = model.model.visual(values, grid_thw=torch.tensor([grid]))
        levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
        wide = torch.cat([level.reshape(count, -1) for level in levels], dim=1)
        row = (3 * count) // 4
        rows.append([first + row, [reference.short(v) for v in wide[row]]])
        first += count
    mtp = {"mtp": drafts(model, head, ids, path["greedy"][0], media, places)} if head is not None and name == "one" else {}
    return {
        "name": name, "pictures": pictures, "grids": grids, "seconds": 1.5 if spaced else 1.0, "ids": ids,
        "places": places[:, 0].T.tolist(), "next": len(ids) + int(deltas[0, 0]), "patches": sampled, "rows": rows,
        **path, **mtp,
    }


@torch.no_grad()
def make(name: str, folder, tokenizer, seed: int) -> None:
    """One model with its reference."""
    write(name, MODELS[name], folder, tokenizer, seed, EXTRA, {}, CHAT_TEMPLATE, processors, CASES, case)


def write(name, raw, folder, tokenizer, seed, extra, named, template, processors, kinds, case) -> None:
    """A checkpoint with its cases: `extra` tokens, some of them `named`, the processors' files, what makes a case."""
    from tokenizers import AddedToken, Tokenizer

    config = transformers.AutoConfig.for_model(raw["model_type"], **{k: v for k, v in raw.items() if k != "model_type"})
    config._attn_implementation = "eager"
    model = getattr(transformers, raw["architectures"][0])(config).float().eval()
    text = raw.get("text_config", raw)
    fill(model, text if raw["model_type"] in (*AROUND, *OWN_NAMES) else {**text, "model_type": raw["model_type"]}, seed)
    if raw["model_type"] in OWN_NAMES:
        gemma4_tensors.fill_buffers(model, seed, getattr(torch, DTYPE))
    checkpoint.fresh(folder)
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in extra])
    assert extended.token_to_id(extra[3]) == VIDEO
    checkpoint.write_side_files(folder, raw, DTYPE, extended)
    written = json.loads((folder / "tokenizer_config.json").read_text())
    written |= {"chat_template": template, **({"extra_special_tokens": named} if named else {})}
    for token in extra:
        written["added_tokens_decoder"][str(extended.token_to_id(token))] = {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True,
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    files = zip(("preprocessor_config", "video_preprocessor_config"), processors(raw))
    for file, (values, kind) in (pair for pair in files if pair[1] is not None):
        key = "image_processor_type" if file == "preprocessor_config" else "video_processor_type"
        values = {**values, key: type(kind).__name__}
        (folder / f"{file}.json").write_text(json.dumps(dict(sorted(values.items())), indent=2) + "\n")
    if raw["model_type"] in AROUND:
        key, kind = AROUND[raw["model_type"]]
        said = key if key in ("image_seq_len", "spatial_merge_size") else "image_seq_length"
        asked_for = key == "spatial_merge_size" or kind == "Llama4Processor"
        patch = {"patch_size": raw["vision_config"]["patch_size"]} if asked_for else {}
        processor = {**({said: raw[key]} if key else {}), **patch, "processor_class": kind}
        (folder / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    head = draft_head(raw, model, seed)
    checkpoint.write_tensors(folder, on_disk(raw, model, head))
    loaded, info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    loaded = loaded.eval()
    for key, value in models.state(model).items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    cases = cases_of(loaded, head, raw, extended, kinds, case)
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32, eager"
    reference.dump({"model": name, "made_with": made_with, "cases": cases}, folder / "reference.json")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:26} {size / 1000:7.0f} kB   {type(loaded).__name__}", flush=True)


def cases_of(model, head, raw: dict, tokenizer, kinds, case, made_by=None) -> list[dict]:
    """A case of each kind with a clear greedy path. With `made_by`, processors other than vision.py's, `kinds` has the items."""
    cases = []
    for name in kinds:
        more = {} if made_by is None else {"items": kinds[name], "made_by": made_by}
        for attempt in range(200):
            about = {"name": name, "seed": attempt * 11 + len(cases), "tail": TAILS[attempt % 4]}
            found = case(model, head, raw, tokenizer, **about, **more)
            if found:
                cases.append(found)
                break
        else:
            raise RuntimeError(f"no clear greedy path: {raw['model_type']}, {name}")
    return cases


TAILS = ["what is it?", "Is the mark dry?", "which one", "Depth and colour?"]
