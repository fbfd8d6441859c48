"""The demo model for training: Qwen3.5's layers for short rows, in few operations, named as in published checkpoints.

Reference: transformers, `modeling_qwen3_5.py`; `export.py` checks that transformers gives the same logits. What differs is the
form: a row is one chunk of the gated delta rule, all pictures of a batch have one size, the patch embedding sees one frame (a
picture's two frames are the same, so that the published kernel is this one, halved, twice).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "full_attention_interval": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 1024,
}
VISION = {
    "depth": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 128,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "model_type": "qwen3_5_vision",
    "num_heads": 4,
    "num_position_embeddings": 16,
    "out_hidden_size": 128,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MERGE, PATCH = VISION["spatial_merge_size"], VISION["patch_size"]
EPS = TEXT["rms_norm_eps"]


class Rms(torch.autograd.Function):
    """x / sqrt(mean(x²) + eps), with half the passes over memory of torch's own."""

    @staticmethod
    def forward(ctx, x, eps):
        inverse = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps))
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx, g):
        y, inverse = ctx.saved_tensors
        along = (g * y).mean(-1, keepdim=True)
        return torch.addcmul(g, y, along, value=-1).mul_(inverse), None


rms = Rms.apply


class Norm(nn.Module):
    """RMS norm whose weight is stored less one."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return rms(x, EPS) * (1 + self.weight)


def linear(n_in: int, n_out: int, bias: bool = False, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(n_in, n_out, bias=bias)
    nn.init.normal_(layer.weight, std=scale / math.sqrt(n_in))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def turn(x, cos, sin):
    """Rotary embedding of the first part of each head; x [.., length, head], cos as wide as what turns."""
    width = cos.shape[-1]
    a, b, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    half_cos, half_sin = cos[..., : width // 2], sin[..., : width // 2]
    return torch.cat([a * half_cos - b * half_sin, b * half_cos + a * half_sin, rest], dim=-1)


def text_angles(places):
    """cos and sin [rows, 1, length, rotary] of places [3, rows, length]."""
    rope = TEXT["rope_parameters"]
    width = int(TEXT["head_dim"] * rope["partial_rotary_factor"])
    inverse = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width))
    axes = places[..., None].float() * inverse
    angles = axes[0].clone()
    for axis in (1, 2):
        which = slice(axis, rope["mrope_section"][axis] * 3, 3)
        angles[..., which] = axes[axis, ..., which]
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        size, self.heads, self.kv, self.head = TEXT["hidden_size"], TEXT["num_attention_heads"], TEXT["num_key_value_heads"], TEXT["head_dim"]
        self.q_proj = linear(size, self.heads * self.head * 2)
        self.k_proj = linear(size, self.kv * self.head)
        self.v_proj = linear(size, self.kv * self.head)
        self.o_proj = linear(self.heads * self.head, size, scale=0.5)
        self.q_norm, self.k_norm = Norm(self.head), Norm(self.head)

    def forward(self, x, angles):
        rows, length, _ = x.shape
        q, gate = self.q_proj(x).view(rows, length, self.heads, 2 * self.head).chunk(2, dim=-1)
        q = turn(self.q_norm(q).transpose(1, 2), *angles)
        k = turn(self.k_norm(self.k_proj(x).view(rows, length, self.kv, self.head)).transpose(1, 2), *angles)
        v = self.v_proj(x).view(rows, length, self.kv, self.head).transpose(1, 2)
        share = self.heads // self.kv
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj((out * gate.sigmoid()).reshape(rows, length, -1))


class GatedNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x, gate):
        return rms(x, EPS) * self.weight * F.silu(gate)


class Delta(nn.Module):
    """The gated delta rule over a row as one chunk."""

    def __init__(self):
        super().__init__()
        size, self.keys, self.values, self.head = TEXT["hidden_size"], TEXT["linear_num_key_heads"], TEXT["linear_num_value_heads"], TEXT["linear_key_head_dim"]
        assert self.head == TEXT["linear_value_head_dim"]
        self.widths = [self.keys * self.head, self.keys * self.head, self.values * self.head]
        self.taps = TEXT["linear_conv_kernel_dim"]
        self.in_proj_qkv = linear(size, sum(self.widths))
        self.in_proj_z = linear(size, self.widths[2])
        self.in_proj_b = linear(size, self.values)
        self.in_proj_a = linear(size, self.values)
        self.conv1d = nn.Conv1d(sum(self.widths), sum(self.widths), self.taps, groups=sum(self.widths), bias=False)
        # Heads that forget within a few tokens, and heads that hardly do.
        steps = torch.exp(torch.linspace(math.log(0.003), math.log(0.2), self.values))
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.A_log = nn.Parameter(torch.log(torch.linspace(1, 4, self.values)))
        self.norm = GatedNorm(self.head)
        self.out_proj = linear(self.widths[2], size, scale=0.5)

    def forward(self, x, _angles):
        rows, length, _ = x.shape
        mixed = F.pad(self.in_proj_qkv(x), (0, 0, self.taps - 1, 0))
        mixed = F.silu(sum(mixed[:, i : i + length] * self.conv1d.weight[:, 0, i] for i in range(self.taps)))
        q, k, v = (
            part.reshape(rows, length, -1, self.head).transpose(1, 2) for part in mixed.split(self.widths, dim=-1)
        )
        share = self.values // self.keys
        # Of length one; the queries divided by the root of the head's width besides.
        eps = 1e-6 / self.head
        q = (rms(q, eps) / self.head).repeat_interleave(share, dim=1)
        k = (rms(k, eps) * self.head**-0.5).repeat_interleave(share, dim=1)
        beta = self.in_proj_b(x).sigmoid().transpose(1, 2)[..., None]
        decay = (-self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)).transpose(1, 2).cumsum(-1)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, float("-inf")).exp()
        kt = k.transpose(-1, -2)
        fresh = torch.linalg.solve_triangular((k * beta) @ kt * between, v * beta, upper=False, unitriangular=True)
        out = ((q @ kt) * between @ fresh).transpose(1, 2)
        out = self.norm(out, self.in_proj_z(x).view(rows, length, -1, self.head))
        return self.out_proj(out.reshape(rows, length, -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        size, inner = TEXT["hidden_size"], TEXT["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = linear(size, inner), linear(size, inner), linear(inner, size, scale=0.5)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(TEXT["hidden_size"]), Norm(TEXT["hidden_size"])
        self.name = "self_attn" if kind == "full_attention" else "linear_attn"
        setattr(self, self.name, Attention() if kind == "full_attention" else Delta())
        self.mlp = Mlp()

    def forward(self, x, angles):
        x = x + getattr(self, self.name)(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(TEXT["vocab_size"], TEXT["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        self.layers = nn.ModuleList(Layer(kind) for kind in TEXT["layer_types"])
        self.norm = Norm(TEXT["hidden_size"])

    def forward(self, x, angles):
        for layer in self.layers:
            x = layer(x, angles)
        return self.norm(x)


class Block(nn.Module):
    """A layer of the vision encoder."""

    def __init__(self):
        super().__init__()
        size, inner = VISION["hidden_size"], VISION["intermediate_size"]
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=1e-6), nn.LayerNorm(size, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": linear(size, 3 * size, True), "proj": linear(size, size, True, 0.5)})
        self.mlp = nn.ModuleDict({"linear_fc1": linear(size, inner, True), "linear_fc2": linear(inner, size, True, 0.5)})
        self.heads = VISION["num_heads"]

    def forward(self, x, angles):
        rows, patches, size = x.shape
        qkv = self.attn["qkv"](self.norm1(x)).view(rows, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(turn(qkv[0], *angles), turn(qkv[1], *angles), qkv[2])
        x = x + self.attn["proj"](out.transpose(1, 2).reshape(rows, patches, size))
        return x + self.mlp["linear_fc2"](F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh"))


class Merger(nn.Module):
    def __init__(self):
        super().__init__()
        size = VISION["hidden_size"] * MERGE**2
        self.norm = nn.LayerNorm(VISION["hidden_size"], eps=1e-6)
        self.linear_fc1, self.linear_fc2 = linear(size, size, True), linear(size, VISION["out_hidden_size"], True)

    def forward(self, x):
        x = self.norm(x).view(x.shape[0], x.shape[1] // MERGE**2, -1)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


def blocks(grid: torch.Tensor) -> torch.Tensor:
    """[h, w, ..] in rows → [h·w, ..] in the order of the merge blocks."""
    h, w = grid.shape[:2]
    return grid.reshape(h // MERGE, MERGE, w // MERGE, MERGE, *grid.shape[2:]).transpose(1, 2).reshape(h * w, *grid.shape[2:])


def patches_of(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 [n, height, width, 3] → [n, patches, 3·patch·patch], normalized, in the order of the merge blocks."""
    n, height, width, _ = pictures.shape
    h, w = height // PATCH, width // PATCH
    x = pictures.float() / 127.5 - 1
    x = x.view(n, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    return x.reshape(n, h * w, 3 * PATCH * PATCH)


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        size = VISION["hidden_size"]
        self.patch_embed = nn.ModuleDict({"proj": linear(3 * PATCH * PATCH, size, True)})
        self.pos_embed = nn.Embedding(VISION["num_position_embeddings"], size)
        nn.init.normal_(self.pos_embed.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(VISION["depth"]))
        self.merger = Merger()

    def forward(self, patches, grid):
        """patches [n, h·w, values], grid (h, w) → [n, h·w / 4, out]."""
        h, w = grid
        side = math.isqrt(VISION["num_position_embeddings"])
        table = self.pos_embed.weight.view(1, side, side, -1).permute(0, 3, 1, 2)
        if grid != (side, side):
            table = F.interpolate(table, size=grid, mode="bilinear", align_corners=True)
        x = self.patch_embed["proj"](patches) + blocks(table[0].permute(1, 2, 0))
        width = VISION["hidden_size"] // VISION["num_heads"] // 2
        inverse = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        where = blocks(torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), dim=-1))
        angles = (where[..., None].float() * inverse).flatten(1)
        angles = torch.cat([angles, angles], dim=-1)
        for block in self.blocks:
            x = block(x, (angles.cos(), angles.sin()))
        return self.merger(x)


class Head(nn.Module):
    """The draft head: hidden state i and token i + 1 → token i + 2."""

    def __init__(self):
        super().__init__()
        size = TEXT["hidden_size"]
        self.fc = linear(2 * size, size)
        self.layers = nn.ModuleList([Layer("full_attention")])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(size), Norm(size), Norm(size)

    def forward(self, embedded, hidden, angles):
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1))
        return self.norm(self.layers[0](x, angles))


class Demo(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"visual": Vision(), "language_model": LanguageModel()})
        self.mtp = Head()

    @property
    def table(self):
        return self.model["language_model"].embed_tokens.weight

    def forward(self, ids, places, pictures=None, grid=None, pads=None):
        """ids [rows, length]; places [3, rows, length]; pictures' patches in order, pads the mask of their tokens → hidden, angles, rows."""
        angles = text_angles(places)
        x = F.embedding(ids, self.table)
        if pictures is not None:
            x = x.masked_scatter(pads[..., None], self.model["visual"](pictures, grid))
        return self.model["language_model"](x, angles), angles, x

    def draft(self, ids, hidden, angles, rows):
        """The head's output at every position but the last; `rows` are the model's own input rows, pictures in them."""
        cos, sin = angles
        return self.mtp(rows[:, 1:], hidden[:, :-1], (cos[:, :, :-1], sin[:, :, :-1]))


def places_of(ids: list[int], image: int, grids: list[tuple[int, int]]) -> list[list[int]]:
    """Time, height and width of each token, as transformers' get_rope_index; grids in patches."""
    places, at, i, grids = [[], [], []], 0, 0, iter(grids)
    while i < len(ids):
        if ids[i] != image:
            for axis in places:
                axis.append(at)
            at, i = at + 1, i + 1
            continue
        h, w = (side // MERGE for side in next(grids))
        places[0] += [at] * (h * w)
        places[1] += [at + y for y in range(h) for _ in range(w)]
        places[2] += [at + x for _ in range(h) for x in range(w)]
        at, i = at + max(h, w), i + h * w
    return places
