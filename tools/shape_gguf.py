#!/usr/bin/env python3
"""Writes a GGUF file of random weights with the real widths of a model, cut in depth: what a bench of speed needs of a large model.

    python3 tools/shape_gguf.py tools/configs/qwen3.5-35b-a3b.json --layers 8 OUT.gguf

Matrices are Q4_K, the output Q6_K, the experts of gpt-oss MXFP4, as in published files; widths that are no multiple of 256 are Q8_0.
Tensors are made and written one at a time: the memory is that of the largest. Needs the packages `gguf` and `numpy`
(tools/requirements.txt). The tokenizer is that of the small fixtures, padded to the vocabulary.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

TOKENIZER = Path(__file__).resolve().parent.parent / "tests/fixtures/models/gguf-qwen2-q8_0/model.gguf"
ARCHITECTURES = {
    "llama": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
}
CHUNK = 8 << 20  # Random bytes that are drawn at once; a larger tensor repeats them.
NORMAL = 1  # A token type of GGUF: answers of random weights have text, without which clients wait for one.
FULL_ATTENTION_EVERY = 4

Tensor = tuple[str, tuple[int, ...], Q]  # name, shape with the input width last, type


def kind(width: int) -> Q:
    """How a matrix of this width is stored."""
    return Q.Q4_K if width % 256 == 0 else Q.Q8_0


def matrix(name: str, *shape: int) -> Tensor:
    """A matrix, or one for each expert."""
    return name + ".weight", shape, kind(shape[-1])


def vector(name: str, *shape: int) -> Tensor:
    """A vector, which stays float."""
    return name, shape, Q.F32


def attention(at: str, c: dict, arch: str) -> Iterator[Tensor]:
    """A layer with keys and values."""
    hidden, dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    widths = {"attn_q": q * (2 if arch.startswith("qwen35") else 1), "attn_k": kv, "attn_v": kv}
    for name, width in widths.items():
        yield matrix(at + name, width, hidden)
    yield matrix(at + "attn_output", hidden, q)
    if arch == "gpt-oss":
        yield vector(at + "attn_sinks.weight", c["num_attention_heads"])
        yield vector(at + "attn_output.bias", hidden)
        for name, width in widths.items():
            yield vector(f"{at}{name}.bias", width)
    elif arch != "llama":
        yield vector(at + "attn_q_norm.weight", dim)
        yield vector(at + "attn_k_norm.weight", dim)


def delta(at: str, c: dict) -> Iterator[Tensor]:
    """A layer of Gated DeltaNet."""
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    yield matrix(at + "attn_qkv", 2 * keys + values, hidden)
    yield matrix(at + "attn_gate", values, hidden)
    yield matrix(at + "ssm_out", hidden, values)
    for name in ("ssm_alpha", "ssm_beta"):
        yield f"{at}{name}.weight", (heads, hidden), Q.Q8_0
    yield vector(at + "ssm_a", heads)
    yield vector(at + "ssm_dt.bias", heads)
    yield vector(at + "ssm_conv1d.weight", 2 * keys + values, c["linear_conv_kernel_dim"])
    yield vector(at + "ssm_norm.weight", c["linear_value_head_dim"])


def feed_forward(at: str, c: dict, arch: str) -> Iterator[Tensor]:
    """What works on each position by itself."""
    hidden, experts = c["hidden_size"], c.get("num_experts", c.get("num_local_experts"))
    if not experts:
        for name in ("ffn_gate", "ffn_up"):
            yield matrix(at + name, c["intermediate_size"], hidden)
        yield matrix(at + "ffn_down", hidden, c["intermediate_size"])
        return
    width = c.get("moe_intermediate_size", c["intermediate_size"] if arch == "gpt-oss" else 0)
    yield vector(at + "ffn_gate_inp.weight", experts, hidden)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    for name, (out, k) in shapes.items():
        yield f"{at}ffn_{name}_exps.weight", (experts, out, k), Q.MXFP4 if arch == "gpt-oss" else kind(k)
        if arch == "gpt-oss":
            yield vector(f"{at}ffn_{name}_exps.bias", experts, out)
    if arch == "gpt-oss":
        yield vector(at + "ffn_gate_inp.bias", experts)
    if shared := c.get("shared_expert_intermediate_size"):
        yield vector(at + "ffn_gate_inp_shexp.weight", hidden)
        for name in ("ffn_gate_shexp", "ffn_up_shexp"):
            yield matrix(at + name, shared, hidden)
        yield matrix(at + "ffn_down_shexp", hidden, shared)


def tensors(c: dict, arch: str, layers: int) -> Iterator[Tensor]:
    """Every tensor of the file."""
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    yield matrix("token_embd", vocab, hidden)
    yield vector("output_norm.weight", hidden)
    if not c.get("tie_word_embeddings"):
        yield "output.weight", (vocab, hidden), Q.Q6_K if hidden % 256 == 0 else Q.Q8_0
    second_norm = "ffn_norm" if arch in ("llama", "qwen3moe") else "post_attention_norm"
    for layer in range(layers):
        at = f"blk.{layer}."
        yield vector(at + "attn_norm.weight", hidden)
        yield vector(f"{at}{second_norm}.weight", hidden)
        recurrent = arch.startswith("qwen35") and (layer + 1) % FULL_ATTENTION_EVERY
        yield from delta(at, c) if recurrent else attention(at, c, arch)
        yield from feed_forward(at, c, arch)


def scales(kind: Q, blocks: np.ndarray, width: int) -> None:
    """Sets the scales of random blocks, so that an output has about the size of the inputs."""
    def put(at: int, value: float) -> None:
        blocks[:, at:at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    size = 1 / math.sqrt(width)
    match kind:
        case Q.Q4_K:  # A code of 0 to 15 by a scale of 0 to 63, less a minimum of 0 to 63.
            put(0, size / 250)
            put(2, 7.5 * size / 250)
        case Q.Q6_K:  # A code of -32 to 31 by a scale of -128 to 127.
            put(208, size / 1300)
        case Q.Q8_0:
            put(0, size / 74)
        case Q.MXFP4:  # Codes of up to 6 by a power of two.
            blocks[:, 0] = 127 + round(math.log2(size / 3))


def data(tensor: Tensor, random: np.random.Generator) -> np.ndarray:
    """Its bytes: of a quantized one [rows, bytes of a row]."""
    name, shape, kind = tensor
    if kind == Q.F32:
        if name.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        if name.endswith("ssm_a"):
            return -random.uniform(1, 8, shape).astype(np.float32)
        return random.normal(0, 1 / math.sqrt(shape[-1]), shape).astype(np.float32)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    row = shape[-1] // elements * size
    rows = math.prod(shape[:-1])
    drawn = min(rows, max(1, CHUNK // row))
    blocks = np.frombuffer(random.bytes(drawn * row), np.uint8).reshape(-1, size).copy()
    scales(kind, blocks, shape[-1])
    return np.resize(blocks.reshape(drawn, row), (rows, row)).reshape(*shape[:-1], row)


def tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """The fixtures' tokenizer with so many tokens."""
    fields = gguf.GGUFReader(TOKENIZER).fields
    def of(name: str):
        return fields["tokenizer." + name].contents()

    tokens, types = of("ggml.tokens"), of("ggml.token_type")
    writer.add_tokenizer_model(of("ggml.model"))
    writer.add_tokenizer_pre(of("ggml.pre"))
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(len(tokens), vocab)])
    writer.add_token_types(types + [NORMAL] * (vocab - len(types)))
    writer.add_token_merges(of("ggml.merges"))
    writer.add_eos_token_id(of("ggml.eos_token_id"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(of("chat_template"))


def describe(writer: gguf.GGUFWriter, c: dict, arch: str, layers: int) -> None:
    """The configuration as metadata."""
    rope = c.get("rope_parameters", {})
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(c.get("intermediate_size", c.get("moe_intermediate_size", 0)))
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope.get("rope_theta", c.get("rope_theta", 1e4))))
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_rope_dimension_count(round(c["head_dim"] * rope.get("partial_rotary_factor", 1)))
    writer.add_vocab_size(c["vocab_size"])
    if experts := c.get("num_experts", c.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c.get("moe_intermediate_size", c.get("intermediate_size")))
    if shared := c.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if arch == "gpt-oss":
        writer.add_sliding_window(c["sliding_window"])
        scaling = c["rope_scaling"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if arch.startswith("qwen35"):
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(c["linear_key_head_dim"])
        writer.add_ssm_group_count(c["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
        writer.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
        writer.add_uint32(f"{arch}.full_attention_interval", FULL_ATTENTION_EVERY)


def main() -> None:
    """Writes the file under another name first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, help="another size of the vocabulary, which is a large part of a model cut in depth")
    args = parser.parse_args()
    whole = json.loads(args.config.read_text())
    c = {"tie_word_embeddings": whole.get("tie_word_embeddings"), **whole.get("text_config", whole)}
    c["vocab_size"] = args.vocab or c["vocab_size"]
    if c["model_type"] not in ARCHITECTURES:
        raise SystemExit(f"{args.config}: model_type '{c['model_type']}' is not supported: use one of {', '.join(ARCHITECTURES)}")
    arch = ARCHITECTURES[c["model_type"]]
    part = args.out.with_suffix(".part")
    writer = gguf.GGUFWriter(part, arch)
    writer.add_name(f"{args.config.stem}, random, {args.layers} layers")
    writer.add_quantization_version(2)
    describe(writer, c, arch, args.layers)
    tokenizer(writer, c["vocab_size"])
    listed = list(tensors(c, arch, args.layers))
    for name, shape, kind in listed:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        stored = (*shape[:-1], shape[-1] // elements * size) if kind != Q.F32 else shape
        dtype = np.dtype(np.float32 if kind == Q.F32 else np.uint8)
        nbytes = math.prod(stored) * dtype.itemsize
        writer.add_tensor_info(name, stored, dtype, nbytes, None if kind == Q.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(1)
    for tensor in listed:
        writer.write_tensor_data(data(tensor, random))
    writer.close()
    part.rename(args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1e9:.2f} GB, {len(listed)} tensors, {args.layers} layers")


if __name__ == "__main__":
    main()
