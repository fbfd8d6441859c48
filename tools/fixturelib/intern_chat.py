"""InternVL in its original form, `InternVLChatModel`: the weights of `tiled.py` under their original names, with queries, keys and values in
one tensor. The expected numbers are those of the form for transformers.

The module undoes transformers' convert_internvl_weights_to_hf.py. It needs no torch:

    cd tools && python3 -m fixturelib.intern_chat
"""

import json
import shutil
import struct
from pathlib import Path

MODELS = {"vl-intern-chat": "vl-intern", "vl-intern-chat-rms": "vl-intern-rms"}
CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CONTEXT = "<IMG_CONTEXT>"
# Replaced in this order.
VISION = {
    "vision_tower.": "vision_model.", "encoder.layer.": "encoder.layers.", "cls_token": "class_embedding",
    "position_embeddings": "position_embedding", "patch_embeddings.projection": "patch_embedding", "lambda_": "ls",
    "attention.projection_layer": "attn.proj", "attention.": "attn.", "layernorm_before": "norm1", "layernorm_after": "norm2",
}
PROJECTOR = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
# As in the published repositories: text alone.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def read_tensors(path: Path) -> dict:
    """name → (dtype, shape, bytes)."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    head.pop("__metadata__", None)
    body = data[8 + length :]
    return {name: (info["dtype"], info["shape"], body[slice(*info["data_offsets"])]) for name, info in head.items()}


def write_tensors(path: Path, tensors: dict) -> None:
    """A safetensors file with the tensors in the order of their names."""
    head, body = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, data) in sorted(tensors.items()):
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def original_name(name: str) -> str:
    """The name of a tensor in the original form."""
    name = name.removeprefix("model.")
    if name.startswith("multi_modal_projector."):
        _, part, leaf = name.split(".")
        return f"mlp1.{PROJECTOR[part]}.{leaf}"
    if name.startswith("language_model.lm_head."):
        return name
    if name.startswith("language_model."):
        return f"language_model.model.{name.removeprefix('language_model.').removeprefix('model.')}"
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    for new, old in VISION.items():
        name = name.replace(new, old)
    return name


def original_tensors(tensors: dict) -> dict:
    """All of them, the rows of queries, keys and values joined."""
    named = {original_name(name): tensor for name, tensor in tensors.items()}
    for query in [name for name in named if ".attn.q_proj." in name]:
        parts = [named.pop(query.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        (dtype, shape, _), joined = parts[0], b"".join(data for _, _, data in parts)
        named[query.replace(".q_proj.", ".qkv.")] = (dtype, [3 * shape[0], *shape[1:]], joined)
    return named


def original_config(raw: dict) -> dict:
    """config.json with the keys of the original classes."""
    text, vision = raw["text_config"], raw["vision_config"]
    side = vision["image_size"][0]
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "downsample_ratio": raw["downsample_ratio"],
        "dynamic_image_size": True,
        "force_image_size": side,
        "llm_config": {**text, "architectures": [CLASSES[text["model_type"]]]},
        "max_dynamic_patch": 4,
        "min_dynamic_patch": 1,
        "model_type": "internvl_chat",
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "tie_word_embeddings": raw["tie_word_embeddings"],
        "torch_dtype": raw["torch_dtype"],
        "use_thumbnail": True,
        "vision_config": {
            "architectures": ["InternVisionModel"], "hidden_act": "gelu", "hidden_size": vision["hidden_size"], "image_size": side,
            "initializer_factor": 0.1, "intermediate_size": vision["intermediate_size"], "layer_norm_eps": vision["layer_norm_eps"],
            "model_type": "intern_vit_6b", "norm_type": vision["norm_type"], "num_attention_heads": vision["num_attention_heads"],
            "num_channels": 3, "num_hidden_layers": vision["num_hidden_layers"], "patch_size": vision["patch_size"][0],
            "qk_normalization": vision.get("use_qk_norm", False), "qkv_bias": vision.get("attention_bias", False),
        },
    }


def make(name: str, models: Path) -> None:
    """One model, made of the finished fixture in the form for transformers."""
    source, folder = models / MODELS[name], models / name
    folder.mkdir(exist_ok=True)
    read = lambda file: json.loads((source / file).read_text())  # noqa: E731
    write = lambda file, value: (folder / file).write_text(json.dumps(value, indent=2) + "\n")  # noqa: E731
    write_tensors(folder / "model.safetensors", original_tensors(read_tensors(source / "model.safetensors")))
    write("config.json", original_config(read("config.json")))
    tokenizer = read("tokenizer_config.json")
    added = {token["content"]: int(id) for id, token in tokenizer["added_tokens_decoder"].items()}
    write("added_tokens.json", added)
    del tokenizer["extra_special_tokens"]
    write("tokenizer_config.json", {**tokenizer, "chat_template": CHAT_TEMPLATE})
    image = read("preprocessor_config.json")
    side = image["size"]["height"]
    write("preprocessor_config.json", {
        "crop_size": side, "do_center_crop": True, "do_normalize": True, "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": image["image_mean"], "image_std": image["image_std"],
        "resample": 3, "size": side,
    })
    for file in ("generation_config.json", "tokenizer.json", "reference.json"):
        shutil.copyfile(source / file, folder / file)
    print(f"{name:26} of {MODELS[name]}", flush=True)


if __name__ == "__main__":
    for model in MODELS:
        make(model, Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "models")
