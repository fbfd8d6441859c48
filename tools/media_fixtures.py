#!/usr/bin/env python3
"""Makes tests/fixtures/media: sizes, token counts and sampled frames as transformers counts them; odd pictures and sounds.

    /somewhere/bin/pip install -r tools/requirements.txt pillow torchvision soundfile
    /somewhere/bin/python tools/media_fixtures.py

Nothing is decoded or run: the processors' own methods are asked, with their resize replaced by one that reports the size it
was asked for (`geometry.json`). `null` stands for an input that the processor refuses. Also the bicubic and bilinear resize of torchvision, as SHA-256 of
its bytes, over pictures from a generator that the Rust tests have too.
"""

import hashlib
import io
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import soundfile
import torch
import transformers
from PIL import Image, ImageOps, ImageSequence
from torchvision.transforms.v2 import functional as tv
from transformers import WhisperFeatureExtractor
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_transforms import convert_to_rgb
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor, get_aspect_ratio_preserving_size
from transformers.models.got_ocr2 import image_processing_got_ocr2 as tiles
from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.llama4 import image_processing_llama4 as llama4
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.pixtral import image_processing_pixtral as pixtral
from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "media"

# As in the checkpoints' own files, and settings that stress the rules: fixed size, tiny budgets, odd factors.
IMAGES = [
    {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2},
    {"min_pixels": 3136, "max_pixels": 1003520},
    {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2},
    {"min_pixels": 50176, "max_pixels": 50176},
    {"min_pixels": 784, "max_pixels": 31360},
    {"size": {"shortest_edge": 900, "longest_edge": 225 * 97}, "patch_size": 5, "merge_size": 3},
]
QWEN2_VIDEOS = [
    {},
    {"min_pixels": 3136, "max_pixels": 12845056, "max_frames": 768},
    {"min_pixels": 100352, "max_pixels": 602112, "fps": 2.0, "cap_pixels_per_frame": True},
    {"min_pixels": 100352, "max_pixels": 602112, "num_frames": 9, "cap_pixels_per_frame": True, "max_video_tokens": 2000},
]
QWEN3_VIDEOS = [
    {},
    {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
    {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "cap_pixels_per_frame": True},
    {"size": {"shortest_edge": 131072, "longest_edge": 786432}, "cap_pixels_per_frame": True, "fps": 1, "max_frames": 50},
]
TILES = [
    {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "max_patches": 12},
    {"size": {"height": 384, "width": 384}, "crop_to_patches": True, "min_patches": 3, "max_patches": 7},
    {"size": {"height": 448, "width": 224}, "crop_to_patches": True, "max_patches": 6},
    {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "max_patches": 1},
    {"size": {"height": 448, "width": 448}},
]

PIECES = [
    {},
    {"tile_size": 128, "encoder_patch_size": 16, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 6},
    {"max_tiles": 3, "use_thumbnail": False, "max_pixels_tolerance": 1.3},
    {"encoder_patch_size": 14, "downsample_factor": 3, "tile_size": 378, "min_image_tokens": 9, "max_image_tokens": 60},
    {"do_image_splitting": False},
]


# Of squares, with the patches of the encoder and those on a side of a token: Idefics3, the smaller and the larger SmolVLM, none cut.
SQUARES = [
    ({}, 14, 2),
    ({"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, 16, 4),
    ({"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}}, 14, 3),
    ({"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 32}}, 4, 2),
    ({"do_image_splitting": False}, 14, 2),
]


# Of sides, with the patches of the encoder and those on a side of a token: Mistral 3, Pixtral alone, a small one.
LONGEST = [
    ({"size": {"longest_edge": 1540}}, 14, 2),
    ({}, 16, 1),
    ({"size": {"longest_edge": 100}}, 4, 3),
]


# Of canvases, with the patches of the encoder and those on a side of a token: as published, small tiles, images enlarged as far as a canvas
# allows, numbers of tiles with few divisors, one tile.
CANVASES = [
    ({}, 14, 2),
    ({"size": {"height": 16, "width": 16}, "max_patches": 6}, 4, 2),
    ({"size": {"height": 336, "width": 336}, "resize_to_max_canvas": True}, 14, 2),
    ({"size": {"height": 45, "width": 45}, "max_patches": 7, "resize_to_max_canvas": True}, 5, 3),
    ({"size": {"height": 45, "width": 45}, "max_patches": 13}, 5, 3),
    ({"size": {"height": 64, "width": 64}, "max_patches": 1}, 16, 2),
]


BUDGETS = [
    {}, {"max_soft_tokens": 70}, {"max_soft_tokens": 1120}, {"max_soft_tokens": 140, "patch_size": 3, "pooling_kernel_size": 2},
]


def sizes(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Extremes first, then sizes spread evenly over the orders of magnitude."""
    fixed = [
        (1, 1), (1, 200), (200, 1), (1, 201), (201, 1), (2, 400), (5, 1001), (13, 2600), (28, 28), (32, 32), (14, 14),
        (42, 42), (70, 70), (98, 98), (48, 80), (1, 65535), (65535, 1), (400, 65535), (224, 224), (1080, 1920),
        (3024, 4032), (4032, 3024), (8192, 8192), (20000, 20000), (448, 448), (449, 447), (1792, 1344), (896, 448),
        (41, 8200), (27, 29), (56, 55), (16383, 100), (82, 16400),
    ]
    spread = [(int(2 ** rng.uniform(0, 14)), int(2 ** rng.uniform(0, 14))) for _ in range(count)]
    aligned = [(14 * rng.randint(1, 80), 14 * rng.randint(1, 80)) for _ in range(count // 4)]
    return fixed + spread + aligned


def asked_size(self, image, size, resample=None, **_):
    """Stands in for the real resize: the size it was asked for."""
    return size.height, size.width


def or_null(call):
    """None where the processor refuses."""
    try:
        return call()
    except (ValueError, ZeroDivisionError):
        return None


def image_rows(config: dict, rng: random.Random) -> list:
    processor = Qwen2VLImageProcessor(**config)
    factor = processor.patch_size * processor.merge_size
    rows = []
    for h, w in sizes(rng, 110):
        blank = SimpleNamespace(shape=(1, 3, h, w))
        size = or_null(lambda: processor.resize(blank, processor.size, None, factor))
        patches = or_null(lambda: processor.get_number_of_image_patches(h, w))
        assert (size is None) == (patches is None)
        rows.append([h, w, *(size or (None, None)), patches and patches // processor.merge_size**2])
    return rows


def budget_rows(config: dict, rng: random.Random) -> list:
    processor = Gemma4ImageProcessor(**config)
    patch, pool = processor.patch_size, processor.pooling_kernel_size
    rows = []
    for h, w in sizes(rng, 110):
        most = processor.max_soft_tokens * pool**2
        high, wide = get_aspect_ratio_preserving_size(h, w, patch, most, pool)
        rows.append([h, w, high, wide, high * wide // (patch * pool) ** 2])
    return rows


def longest_rows(config: dict, patch: int, rng: random.Random) -> list:
    """Of each size the size that the picture is given; none where nothing is left of a side."""
    one, rows = PixtralImageProcessor(**config), []
    for h, w in sizes(rng, 110):
        blank = np.broadcast_to(np.uint8(0), (3, h, w))
        size = pixtral.get_resize_output_image_size(blank, one.size["longest_edge"], patch, "channels_first")
        rows.append([h, w, *(size if min(size) else (None, None))])
    return rows


def square_rows(config: dict, rng: random.Random) -> list:
    """Of each size the first size, the canvas, and rows and columns of squares."""
    one, rows = Idefics3ImageProcessor(**config), []
    side = one.max_image_size["longest_edge"]
    blank = lambda h, w: SimpleNamespace(shape=(1, 3, h, w), size=lambda: (1, 3, h, w))  # noqa: E731
    for h, w in sizes(rng, 110):
        first = one.resize(blank(h, w), one.size)
        canvas = one.resize_for_vision_encoder(blank(*first), side) if one.do_image_splitting else (side, side)
        rows.append([h, w, *first, *canvas, canvas[0] // side, canvas[1] // side])
    return rows


class Laid(Exception):
    """Ends an image processor where all sizes are chosen."""


def canvas_rows(config: dict, rng: random.Random) -> list:
    """Of each size the size on the canvas, the canvas, and rows and columns of tiles."""

    def laid(image, canvas, *_):
        raise Laid(*map(int, (*image, *canvas)))

    one, rows, whole = Llama4ImageProcessor(**config), [], llama4.pad_to_best_fit
    llama4.pad_to_best_fit = laid
    side = one.size["height"]
    asked = {key: getattr(one, key) for key in ("do_resize", "size", "resample", "max_patches", "resize_to_max_canvas")}
    rest = dict.fromkeys(("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "return_tensors"))
    for h, w in sizes(rng, 110):
        blank = torch.zeros((3, 1, 1), dtype=torch.uint8).expand(3, h, w)
        try:
            one._preprocess([blank], disable_grouping=True, **asked, **rest)
        except Laid as found:
            high, wide, canvas_high, canvas_wide = found.args
            rows.append([h, w, high, wide, canvas_high, canvas_wide, canvas_high // side, canvas_wide // side])
    llama4.pad_to_best_fit = whole
    return rows


def canvas_patches() -> list:
    """What the whole image processor makes of a picture: tiles, and SHA-256 of their patches in the order of an encoder's rows."""
    rows, patch, merge = [], 4, 2
    for config in [
        {"size": {"height": 16, "width": 16}, "max_patches": 6},
        {"size": {"height": 24, "width": 24}, "max_patches": 4, "resize_to_max_canvas": True, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.25]},
    ]:
        processor = Llama4ImageProcessor(**config)
        for h, w in [(56, 84), (16, 16), (300, 20), (9, 150), (33, 17), (1, 1), (1, 2000)]:
            made = processor(Image.fromarray(noise(h, w)), return_tensors="pt")["pixel_values"].float()
            side = made.shape[-1] // (patch * merge)
            values = made.reshape(len(made), 3, side, merge, patch, side, merge, patch).permute(0, 2, 5, 3, 6, 1, 4, 7)
            rows.append([config, h, w, len(made), hashlib.sha256(values.contiguous().numpy().astype("<f4").tobytes()).hexdigest()])
    return rows


def video_rows(kind, config: dict, rng: random.Random) -> list:
    processor = kind(**config)
    rows = []
    shapes = [(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 64, 333, 768]), h, w) for h, w in sizes(rng, 60)]
    for t, h, w in shapes:
        blank = SimpleNamespace(shape=(1, t, 3, h, w))
        size = or_null(lambda: processor.resize(
            blank, processor.size, None, factor=processor.patch_size * processor.merge_size,
            temporal_factor=processor.temporal_patch_size, cap_pixels_per_frame=processor.cap_pixels_per_frame))
        grid_t = (t + -t % processor.temporal_patch_size) // processor.temporal_patch_size
        tokens = size and grid_t * size[0] * size[1] // (processor.patch_size * processor.merge_size) ** 2
        rows.append([t, h, w, *(size or (None, None)), tokens])
    return rows


def sampling_rows(processor, rng: random.Random, fps_wanted=None) -> list:
    rows = []
    totals = [1, 2, 3, 4, 5, 7, 8, 24, 25, 30, 100, 101, 750, 1000, 7200, 100000]
    totals += [rng.randint(1, 3000) for _ in range(40)]
    for total in totals:
        fps = rng.choice([1, 10, 23.976, 24, 25, 29.97, 30, 60, 0.5, 12.5])
        meta = VideoMetadata(total_num_frames=total, fps=fps)
        indices = or_null(lambda: processor.sample_frames(meta, fps=fps_wanted).tolist())
        digest = indices and hashlib.sha256(np.asarray(indices, dtype="<u4").tobytes()).hexdigest()[:16]
        times = None
        if indices and isinstance(processor, Qwen3VLVideoProcessor):
            times = Qwen3VLProcessor._calculate_timestamps(None, list(indices), fps, processor.temporal_patch_size)
            times = " ".join(f"{t:.1f}" for t in times)
            times = times if len(times) < 200 else hashlib.sha256(times.encode()).hexdigest()[:16]
        rows.append([total, fps, len(indices) if indices else None, digest or None, times])
    return rows


def tile_rows(config: dict, rng: random.Random) -> list:
    processor = tiles.GotOcr2ImageProcessor(**config)
    size, rows = (processor.size["height"], processor.size["width"]), []
    for h, w in sizes(rng, 110):
        columns, lines = 1, 1
        if processor.crop_to_patches:
            columns, lines = tiles.get_optimal_tiled_canvas((h, w), size, processor.min_patches, processor.max_patches)
        rows.append([h, w, columns, lines, processor.get_number_of_image_patches(h, w)])
    return rows


def piece_rows(config: dict, rng: random.Random) -> list:
    """Of each size the whole picture's size, columns and rows of tiles, and all tokens. A piece that is longer than the padded ones
    fails in the reference's model, not in its processor."""
    one = Lfm2VlImageProcessor(**config)
    patch, factor, rows = one.encoder_patch_size, one.downsample_factor, []
    for h, w in sizes(rng, 110):
        about = {"max_image_tokens": one.max_image_tokens, "encoder_patch_size": patch, "downsample_factor": factor}
        large = one._is_image_too_large(h, w, max_pixels_tolerance=one.max_pixels_tolerance, **about) and one.do_image_splitting
        width, height = one.smart_resize(h, w, min_image_tokens=one.min_image_tokens, **about)
        columns, lines, *_ = one._get_grid_layout(h, w, one.min_tiles, one.max_tiles, one.tile_size) if large else (1, 1)
        tokens = Lfm2VlProcessor._compute_tokens_for_image(None, (height, width), patch, factor)
        if not large or one.use_thumbnail:
            if tokens * factor**2 > one.max_num_patches:
                rows.append([h, w, None, None, None, None, None])
                continue
        else:
            tokens = 0
        if large:
            tokens += columns * lines * Lfm2VlProcessor._compute_tokens_per_tile(None, one.tile_size, patch, factor)
        rows.append([h, w, height, width, columns, lines, tokens])
    return rows


def piece_patches() -> list:
    """What the whole image processor makes of a picture: grids, and SHA-256 of the pieces' patches in the order of an encoder's rows."""
    rows = []
    for config in [
        {"tile_size": 128, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 6, "do_resize": False, "encoder_patch_size": 16},
        {"tile_size": 64, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 3, "use_thumbnail": False},
    ]:
        processor = Lfm2VlImageProcessor(**config)
        for h, w in [(56, 84), (64, 96), (300, 200), (9, 150), (90, 400), (1, 1)]:
            made = processor(Image.fromarray(noise(h, w)), return_tensors="pt")
            grids, digest = made["spatial_shapes"].tolist(), hashlib.sha256()
            for values, (down, across) in zip(made["pixel_values"], grids):
                values = values[: down * across].reshape(down // 2, 2, across // 2, 2, 16, 16, 3)
                digest.update(values.permute(0, 2, 1, 3, 6, 4, 5).contiguous().numpy().astype("<f4").tobytes())
            rows.append([config, h, w, grids, digest.hexdigest()])
    return rows


def audio_rows(rng: random.Random) -> list:
    extractor = WhisperFeatureExtractor(feature_size=128)
    rows = []
    for samples in [201, 319, 320, 15999, 16000, 16001, 479999, 480000, 480160, 500000]:
        out = extractor(np.zeros(samples, np.float32), sampling_rate=16000, padding=True, truncation=False,
                        return_attention_mask=True, return_tensors="np")
        frames = int(out["attention_mask"].sum())
        assert frames == samples // 160 == out["input_features"].shape[-1], (samples, frames)
    lengths = list(range(0, 32000, 160)) + [rng.randint(0, 16000 * 7200) for _ in range(200)]
    for samples in lengths:
        rows.append([samples, int(_get_feat_extract_output_lengths(samples // 160))])
    return rows


def noise(height: int, width: int) -> np.ndarray:
    """The picture of the resize cases: a gradient with hard edges and noise on top."""
    state, out = height * 65536 + width, np.empty((height, width, 3), np.uint8)
    for y in range(height):
        for x in range(width):
            for c in range(3):
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
                base = (x * 3 + y * 5 + c * 40) % 256 if (x // 7 + y // 5) % 2 else 255 * (c % 2)
                out[y, x, c] = min(255, max(0, base + (state >> 58) - 32))
    return out


def resize_rows(filter: str = "BICUBIC") -> list:
    rows = []
    for (h, w), (oh, ow) in [
        ((56, 56), (56, 56)), ((60, 90), (56, 84)), ((50, 33), (112, 84)), ((200, 300), (28, 56)), ((7, 140), (28, 560)),
        ((300, 40), (56, 28)), ((97, 101), (96, 96)), ((97, 96), (96, 96)), ((1, 1), (28, 28)), ((1, 100), (28, 280)),
        ((3, 500), (28, 28)), ((128, 256), (448, 448)), ((255, 254), (336, 112)), ((400, 300), (140, 392)),
    ]:
        picture = noise(h, w)
        tensor = torch.from_numpy(picture).permute(2, 0, 1).contiguous()
        out = tv.resize(tensor, [oh, ow], interpolation=tv.InterpolationMode[filter], antialias=True)
        out = out.permute(1, 2, 0).contiguous().numpy()
        pil = np.asarray(Image.fromarray(picture).resize((ow, oh), Image.Resampling[filter]))
        apart = int(np.abs(out.astype(int) - pil.astype(int)).max())
        rows.append([h, w, oh, ow, hashlib.sha256(out.tobytes()).hexdigest(), apart])
    return rows


def patch_rows() -> list:
    """What the whole image processor makes of a picture: SHA-256 of its `pixel_values`."""
    rows = []
    for config in [
        {"min_pixels": 3136, "max_pixels": 12845056},
        {"size": {"shortest_edge": 4096, "longest_edge": 65536}, "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ]:
        processor = Qwen2VLImageProcessor(**config)
        for h, w in [(56, 84), (60, 90), (300, 200), (9, 400)]:
            values = processor(Image.fromarray(noise(h, w)), return_tensors="pt")["pixel_values"].contiguous().numpy()
            rows.append([config, h, w, values.shape[0], hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()])
    return rows


def save(name: str, data: bytes) -> None:
    """Writes one file."""
    (OUT / name).write_bytes(data)


def pictures() -> None:
    """Small pictures of every awkward kind, and what transformers makes of them: upright, on white."""
    rng = np.random.default_rng(20)
    y, x = np.mgrid[0:20, 0:28]
    smooth = np.stack([x * 9, y * 12, 255 - x * 4 - y * 5], -1).clip(0, 255).astype(np.uint8)
    color = Image.fromarray(smooth)
    alpha = Image.fromarray(np.dstack([smooth, (x * 9 % 256).astype(np.uint8)]))
    palette = color.quantize(16)
    exif = Image.Exif()
    exif[0x0112] = 6
    cases = {
        "rgb.png": (color, {}), "rgba.png": (alpha, {}), "palette.png": (palette, {"transparency": 3}),
        "gray.png": (color.convert("L"), {}), "gray_alpha.png": (alpha.convert("LA"), {}), "bits.png": (color.convert("1"), {}),
        "turned.jpg": (color, {"exif": exif, "quality": 95, "subsampling": 0}), "cmyk.jpg": (color.convert("CMYK"), {"quality": 95}),
        "gray.jpg": (color.convert("L"), {"quality": 95}), "progressive.jpg": (color, {"progressive": True, "quality": 90}),
        "turned.webp": (alpha, {"lossless": True, "exact": True, "exif": exif}), "lossy.webp": (color, {"quality": 90}),
        "palette.gif": (palette, {}), "clear.gif": (palette, {"transparency": 5}), "key.png": (color, {"transparency": color.getpixel((9, 9))}),
    }
    for name, (picture, options) in cases.items():
        picture.save(OUT / name, **options)
    wide = rng.integers(0, 65536, (5, 7), dtype=np.uint16)
    Image.fromarray(wide).save(OUT / "gray16.png")
    expected = {}
    for name in [*cases, "gray16.png"]:
        opened = ImageOps.exif_transpose(Image.open(OUT / name))
        # Pillow clips 16-bit grey instead of scaling it; what is wanted is its upper half.
        rgb = np.dstack([wide >> 8] * 3).astype(np.uint8) if name == "gray16.png" else convert_to_rgb(opened, return_numpy=True)
        expected[name] = [rgb.shape[0], rgb.shape[1], rgb.tobytes().hex()]
    # Large in pixels, small in bytes: for what decoding costs.
    large = color.resize((2000, 1500))
    large.save(OUT / "large.jpg", progressive=True, quality=20)
    large.save(OUT / "large.webp", quality=20)
    moving = [Image.fromarray(np.roll(smooth, 3 * i, 1)) for i in range(4)]
    for name, options in [("moving.gif", {"duration": 100}), ("moving.webp", {"duration": 100, "lossless": True})]:
        moving[0].save(OUT / name, save_all=True, append_images=moving[1:], **options)
        for i, frame in enumerate(ImageSequence.Iterator(Image.open(OUT / name))):
            expected[f"{name} {i}"] = [20, 28, convert_to_rgb(frame, return_numpy=True).tobytes().hex()]
    (OUT / "pictures.json").write_text(json.dumps(expected, indent=0) + "\n")


def patchwork(height: int, width: int) -> Image.Image:
    """Squares of noise, of slopes, of few values and of one: what a lossless encoder gives prefix codes of their own."""
    rng, values = random.Random(20), bytearray()
    for y in range(height):
        for x in range(width):
            kind = (y // 16 * 3 + x // 16) % 4
            noisy = bytes(rng.randrange(256) for _ in range(3)), bytes(rng.randrange(4) * 60 for _ in range(3))
            slopes = bytes((x * 3 % 256, y * 3 % 256, (x + y) * 3 % 256))
            values += (noisy[0], slopes, noisy[1], b"\xc8" * 3)[kind]
    return Image.frombytes("RGB", (width, height), bytes(values))


def blocks() -> None:
    """Lossless pictures, and an alpha, that have prefix codes by the block, transforms, a palette and a colour cache."""
    best = {"lossless": True, "method": 6, "quality": 100}
    patches = patchwork(32, 64)
    patches.save(OUT / "blocks.webp", **best)
    patches.quantize(14).save(OUT / "blocks_palette.webp", **best)
    clear = patches.copy()
    clear.putalpha(patches.getchannel("G"))
    clear.save(OUT / "blocks_alpha.webp", quality=1, method=6)


def sounds() -> None:
    """A short chord in every format. Containers carry random serial numbers and the time, so what is there stays."""
    if (OUT / "opus.ogg").exists():
        return
    t = np.arange(3200) / 16000
    left = 0.4 * np.sin(2 * np.pi * 440 * t) + 0.2 * np.sin(2 * np.pi * 1000 * t)
    both = np.stack([left, 0.5 * left], -1)
    for name, options in [
        ("chord.wav", {"subtype": "PCM_16"}), ("chord_float.wav", {"subtype": "FLOAT"}), ("chord.flac", {"subtype": "PCM_16"}),
        ("chord.ogg", {"format": "OGG", "subtype": "VORBIS"}), ("chord.mp3", {"format": "MP3"}),
    ]:
        soundfile.write(OUT / name, both, 16000, **options)
    opus = io.BytesIO()
    soundfile.write(opus, both, 16000, format="OGG", subtype="OPUS")
    save("opus.ogg", opus.getvalue())


def main() -> None:
    """Writes the files."""
    OUT.mkdir(parents=True, exist_ok=True)
    pictures()
    blocks()
    sounds()
    patched, pieces_patched, canvases_patched = patch_rows(), piece_patches(), canvas_patches()
    TorchvisionBackend.resize = asked_size
    rng = random.Random(20)
    fast = Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
    made = {
        "transformers": transformers.__version__,
        "images": [{"config": c, "rows": image_rows(c, rng)} for c in IMAGES],
        "qwen2_videos": [{"config": c, "rows": video_rows(fast[0], c, rng)} for c in QWEN2_VIDEOS],
        "qwen3_videos": [{"config": c, "rows": video_rows(fast[1], c, rng)} for c in QWEN3_VIDEOS],
        "qwen2_sampling": [
            {"config": c, "rows": sampling_rows(fast[0](**c), rng)} for c in QWEN2_VIDEOS if "fps" in c or "num_frames" in c
        ],
        "qwen3_sampling": [{"config": c, "rows": sampling_rows(fast[1](**c), rng)} for c in QWEN3_VIDEOS],
        "tile_sampling": [
            {"config": {"num_frames": 8}, "rows": sampling_rows(InternVLVideoProcessor(num_frames=8), rng)},
            {"config": {"fps": 2}, "rows": sampling_rows(InternVLVideoProcessor(), rng, fps_wanted=2)},
        ],
        "tiles": [{"config": c, "rows": tile_rows(c, rng)} for c in TILES],
        "audio": audio_rows(rng),
        "resize": resize_rows(),
        "resize_bilinear": resize_rows("BILINEAR"),
        "resize_lanczos": resize_rows("LANCZOS"),
        "patches": patched,
        "pieces": [{"config": c, "rows": piece_rows(c, random.Random(21))} for c in PIECES],
        "piece_patches": pieces_patched,
        "squares": [
            {"config": c, "patch": patch, "merge": merge, "rows": square_rows(c, random.Random(22))} for c, patch, merge in SQUARES
        ],
        "canvases": [
            {"config": c, "patch": patch, "merge": merge, "rows": canvas_rows(c, random.Random(24))} for c, patch, merge in CANVASES
        ],
        "canvas_patches": canvases_patched,
        "longest": [
            {"config": c, "patch": patch, "merge": merge, "rows": longest_rows(c, patch * merge, random.Random(23))}
            for c, patch, merge in LONGEST
        ],
        "budgets": [{"config": c, "rows": budget_rows(c, rng)} for c in BUDGETS],
    }
    text = json.dumps(made, separators=(",", ":")).replace("]],", "]],\n").replace("],[", "],\n[")
    (OUT / "geometry.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
