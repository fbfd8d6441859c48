"""Pictures with one right answer each: numbers in four hands, shapes in colours, several shapes to count.

Glyphs and shapes are drawn once, in many styles, as masks (an Atlas); a picture puts masks of one style on a ground, tints
them and adds noise. Another seed gives other styles, so the evaluation's pictures are of styles that training never saw. Numbers of three
digits are kept for the evaluation in a tenth of all cases.
"""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (220, 30, 30), "green": (30, 160, 50), "blue": (40, 70, 220), "yellow": (245, 225, 40),
    "orange": (250, 135, 10), "purple": (140, 40, 170), "white": (248, 248, 248), "black": (12, 12, 12),
}
SHAPES = ["circle", "square", "triangle", "star", "cross"]
PLURALS = {s: f"{s}s" for s in SHAPES} | {"cross": "crosses"}
SIZES = [20, 23, 27, 32, 38]
STYLES = 8
SHAPE_SIZES = [11, 13, 15, 17, 20, 24, 29, 35, 42, 50]
SHAPE_STYLES = 8
# Shapes to be counted have a square of this side each, and are no larger than the third of the sizes.
CELL = 21

READ = [
    "What number is in the picture?", "What number do you see?", "Which number is drawn?", "Read the number.", "What number is this?",
    "What is the number in the image?", "Read the digits.",
]
WHAT = ["What is in the picture?", "What do you see?", "Describe the picture.", "What is this?"]
COLOUR = ["What colour is the {s}?", "What color is the {s}?", "What colour is it?", "What color is this?"]
SHAPE = ["What shape is it?", "What shape is in the picture?", "Which shape is {c}?", "Name the shape."]
BOTH = ["Name the colour and shape.", "What colour and shape is it?", "What color and shape is this?"]
MANY = ["How many {p} are there?", "How many {p} are in the picture?", "How many shapes are there?", "Count the {p}.", "Count the shapes."]

# Rows of five pixels.
FIVE_BY_SEVEN = {
    "0": "01110 10001 10011 10101 11001 10001 01110", "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00010 00100 01000 11111", "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010", "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110", "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110", "9": "01110 10001 10001 01111 00001 00010 01100",
}
# Which of the seven segments are lit: top, upper right, lower right, bottom, lower left, upper left, middle.
SEGMENTS = ["0123 45", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356"]
# Strokes of a pen in a box of one by one, as written by hand.
PEN = {
    "0": [[(.5, .02), (.15, .2), (.08, .5), (.18, .85), (.5, .98), (.82, .85), (.92, .5), (.85, .2), (.5, .02)]],
    "1": [[(.25, .25), (.55, .02), (.55, .98)]],
    "2": [[(.1, .25), (.3, .05), (.65, .04), (.88, .25), (.8, .45), (.1, .97), (.92, .97)]],
    "3": [[(.12, .15), (.4, .02), (.8, .12), (.82, .35), (.42, .48), (.88, .62), (.86, .85), (.45, .98), (.08, .86)]],
    "4": [[(.65, .02), (.08, .66), (.95, .66)], [(.7, .35), (.7, .98)]],
    "5": [[(.88, .03), (.2, .03), (.15, .45), (.55, .38), (.88, .58), (.84, .84), (.5, .98), (.08, .88)]],
    "6": [[(.8, .06), (.35, .25), (.1, .65), (.25, .93), (.6, .98), (.88, .78), (.75, .53), (.4, .5), (.14, .68)]],
    "7": [[(.08, .04), (.92, .04), (.4, .98)]],
    "8": [[(.5, .48), (.18, .3), (.28, .06), (.5, .02), (.75, .07), (.82, .28), (.5, .48), (.12, .7), (.25, .95), (.5, .98), (.78, .94), (.88, .7), (.5, .48)]],
    "9": [[(.86, .3), (.6, .5), (.25, .48), (.1, .25), (.3, .04), (.7, .03), (.88, .3), (.8, .7), (.6, .98)]],
}
HANDS = ["type", "pixels", "segments", "pen"]


def held_out(number: int) -> bool:
    """Whether a number of three digits is one of those that are never trained on."""
    return number >= 100 and (number * 2654435761 >> 9) % 10 == 0


def draw_digit(hand: str, digit: int, height: int, rng_style: dict) -> Image.Image:
    """A digit as a mask, four times too large."""
    h = height * 4
    w = int(h * rng_style["width"])
    bold = rng_style["bold"]
    image = Image.new("L", (w + h // 2, h + h // 2), 0)
    pen, x, y = ImageDraw.Draw(image), h // 4, h // 4
    if hand == "type":
        font = ImageFont.load_default(size=int(h * 1.32))
        pen.text((x + w / 2, y + h / 2), str(digit), fill=255, font=font, anchor="mm", stroke_width=int(bold * h * 0.035))
    elif hand == "pixels":
        dx, dy = w / 5, h / 7
        for row, line in enumerate(FIVE_BY_SEVEN[str(digit)].split()):
            for column, bit in enumerate(line):
                if bit == "1":
                    pen.rectangle((x + column * dx, y + row * dy, x + (column + 1) * dx, y + (row + 1) * dy), fill=255)
    elif hand == "segments":
        t = h * (0.09 + 0.05 * bold)
        ends = [((0, 0), (1, 0)), ((1, 0), (1, .5)), ((1, .5), (1, 1)), ((0, 1), (1, 1)), ((0, .5), (0, 1)), ((0, 0), (0, .5)), ((0, .5), (1, .5))]
        for index in SEGMENTS[digit].replace(" ", ""):
            (ax, ay), (bx, by) = ends[int(index)]
            pen.line((x + ax * w, y + ay * h, x + bx * w, y + by * h), fill=255, width=int(t))
    else:
        t = h * (0.07 + 0.07 * bold)
        wobble = rng_style["wobble"]
        for number, stroke in enumerate(PEN[str(digit)]):
            points = [
                (x + (px + wobble[digit, number, i % 16, 0]) * w, y + (py + wobble[digit, number, i % 16, 1]) * h)
                for i, (px, py) in enumerate(stroke)
            ]
            pen.line(points, fill=255, width=int(t), joint="curve")
            for px, py in points:
                pen.ellipse((px - t / 2, py - t / 2, px + t / 2, py + t / 2), fill=255)
    return image


def tilt(image: Image.Image, degrees: float, shear: float) -> Image.Image:
    image = image.transform(image.size, Image.Transform.AFFINE, (1, shear, -shear * image.height / 2, 0, 1, 0), Image.Resampling.BILINEAR)
    return image.rotate(degrees, Image.Resampling.BILINEAR)


def mask_of(image: Image.Image) -> np.ndarray:
    """The drawn part at its real size, 0 to 1."""
    image = image.crop(image.getbbox())
    size = max(1, round(image.width / 4)), max(1, round(image.height / 4))
    return np.asarray(image.resize(size, Image.Resampling.BOX), dtype=np.float32) / 255


def draw_shape(shape: str, size: int) -> Image.Image:
    s = size * 4
    image = Image.new("L", (s * 3 // 2, s * 3 // 2), 0)
    pen, c, r = ImageDraw.Draw(image), s * 3 / 4, s / 2
    if shape == "circle":
        pen.ellipse((c - r, c - r, c + r, c + r), fill=255)
    elif shape == "square":
        pen.rectangle((c - r * .9, c - r * .9, c + r * .9, c + r * .9), fill=255)
    elif shape == "triangle":
        pen.polygon([(c, c - r), (c + r, c + r * .8), (c - r, c + r * .8)], fill=255)
    elif shape == "star":
        corners = [(r if i % 2 == 0 else r * .42, math.pi * (i / 5 - .5)) for i in range(10)]
        pen.polygon([(c + d * math.cos(a), c + d * math.sin(a)) for d, a in corners], fill=255)
    else:
        t = r * .34
        pen.rectangle((c - t, c - r, c + t, c + r), fill=255)
        pen.rectangle((c - r, c - t, c + r, c + t), fill=255)
    return image


class Atlas:
    """All masks of one seed."""

    def __init__(self, seed: int):
        rng = np.random.default_rng([seed, 77])
        self.digits, self.shapes = {}, {}
        for hand in HANDS:
            for size in SIZES:
                for style in range(STYLES):
                    look = {
                        "width": rng.uniform(0.5, 0.72), "bold": rng.random(),
                        "wobble": rng.normal(0, 0.035, (10, 2, 16, 2)),
                    }
                    degrees, shear = rng.uniform(-8, 8), rng.uniform(-0.2, 0.2)
                    self.digits[hand, size, style] = [
                        mask_of(tilt(draw_digit(hand, d, size, look), degrees + rng.uniform(-2, 2), shear)) for d in range(10)
                    ]
        for shape in SHAPES:
            for size in SHAPE_SIZES:
                for style in range(SHAPE_STYLES):
                    self.shapes[shape, size, style] = mask_of(draw_shape(shape, size).rotate(rng.uniform(-14, 14), Image.Resampling.BILINEAR))


def tinted(rng, name: str) -> np.ndarray:
    return np.clip(np.array(COLOURS[name]) + rng.uniform(-18, 18, 3), 0, 255)


def ground(rng, against: list[np.ndarray]) -> np.ndarray:
    """A background colour that all of these stand out from."""
    while True:
        kind = rng.random()
        if kind < 0.4:
            colour = np.full(3, rng.choice([rng.uniform(225, 255), rng.uniform(0, 40)]))
        elif kind < 0.7:
            colour = np.full(3, rng.uniform(0, 255)) + rng.uniform(-15, 15, 3)
        else:
            colour = rng.uniform(0, 255, 3)
        if all(np.abs(colour - other).sum() > 190 for other in against):
            return np.clip(colour, 0, 255)


def paste(canvas, mask, colour, top: int, left: int) -> None:
    h, w = mask.shape
    part = canvas[top:top + h, left:left + w]
    part += mask[:part.shape[0], :part.shape[1], None] * (colour - part)


def blank(rng, size, colour) -> np.ndarray:
    canvas = np.empty((*size, 3), dtype=np.float32)
    canvas[:] = colour
    if rng.random() < 0.3:
        canvas += np.linspace(-1, 1, size[1], dtype=np.float32)[None, :, None] * rng.uniform(-20, 20)
    return canvas


def finish(rng, canvas) -> np.ndarray:
    if rng.random() < 0.7:
        canvas = canvas + rng.standard_normal(canvas.shape, dtype=np.float32) * rng.uniform(0, 14)
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)


def number(rng, atlas: Atlas, size, value: int) -> np.ndarray:
    """A number somewhere in a picture of size (height, width)."""
    while True:
        hand = HANDS[int(rng.integers(len(HANDS)))]
        masks = atlas.digits[hand, SIZES[int(rng.integers(len(SIZES)))], int(rng.integers(STYLES))]
        masks = [masks[int(d)] for d in str(value)]
        gap = int(rng.integers(2, 6))
        width, height = sum(m.shape[1] + gap for m in masks) - gap, max(m.shape[0] for m in masks)
        if width <= size[1] - 4 and height <= size[0] - 4:
            break
    if rng.random() < 0.5:
        ink = tinted(rng, list(COLOURS)[int(rng.integers(len(COLOURS)))])
    else:
        ink = np.full(3, rng.choice([rng.uniform(0, 60), rng.uniform(200, 255)]))
    canvas = blank(rng, size, ground(rng, [ink]))
    left, top = int(rng.integers(2, size[1] - width - 1)), int(rng.integers(2, size[0] - height - 1))
    for mask in masks:
        down = (height - mask.shape[0]) // 2
        paste(canvas, mask, ink, top + down, left)
        left += mask.shape[1] + gap
    return finish(rng, canvas)


def some_number(rng, kept: bool, digits=None) -> int:
    digits = digits or int(rng.choice([1, 2, 3], p=[0.2, 0.35, 0.45]))
    while True:
        value = int(rng.integers(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
        if digits < 3 or held_out(value) == kept:
            return value


def read(rng, atlas, size, kept=False):
    digits = None if size[1] >= 64 else int(rng.integers(1, 3)) if size[1] > 32 else 1
    value = some_number(rng, kept, digits)
    picture = number(rng, atlas, size, value)
    if rng.random() < 0.1:
        return [picture], WHAT[int(rng.integers(len(WHAT)))], f"The number {value}."
    return [picture], READ[int(rng.integers(len(READ)))], str(value)


def named(rng, atlas, size, kept=False):
    """One shape: its colour, its shape, both."""
    shape, colour = SHAPES[int(rng.integers(len(SHAPES)))], list(COLOURS)[int(rng.integers(len(COLOURS)))]
    fitting = [s for s in SHAPE_SIZES if s >= 15 and s <= min(size) * 0.75]
    mask = atlas.shapes[shape, fitting[int(rng.integers(len(fitting)))], int(rng.integers(SHAPE_STYLES))]
    ink = tinted(rng, colour)
    canvas = blank(rng, size, ground(rng, [ink]))
    paste(canvas, mask, ink, int(rng.integers(0, size[0] - mask.shape[0] + 1)), int(rng.integers(0, size[1] - mask.shape[1] + 1)))
    picture, kind = finish(rng, canvas), rng.random()
    if kind < 0.3:
        return [picture], COLOUR[int(rng.integers(len(COLOUR)))].format(s=shape), colour
    if kind < 0.6:
        return [picture], SHAPE[int(rng.integers(len(SHAPE)))].format(c=colour), shape
    article = "an" if colour == "orange" else "a"
    if kind < 0.8:
        return [picture], BOTH[int(rng.integers(len(BOTH)))], f"{colour} {shape}"
    return [picture], WHAT[int(rng.integers(len(WHAT)))], f"{article.capitalize()} {colour} {shape}."


def counted(rng, atlas, size, kept=False):
    """One to six of a shape, no two touching."""
    rows, columns = size[0] // CELL, size[1] // CELL
    n = int(rng.integers(1, min(6, rows * columns) + 1))
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    one = rng.random() < 0.75
    names = [list(COLOURS)[int(rng.integers(len(COLOURS)))]] * n if one else [list(COLOURS)[int(i)] for i in rng.integers(0, 6, n)]
    inks = [tinted(rng, names[0])] * n if one else [tinted(rng, c) for c in names]
    canvas = blank(rng, size, ground(rng, inks) if one else np.full(3, rng.choice([rng.uniform(235, 255), rng.uniform(0, 20)])))
    side, style = SHAPE_SIZES[int(rng.integers(3))], int(rng.integers(SHAPE_STYLES))
    for cell, ink in zip(rng.permutation(rows * columns)[:n], inks):
        mask = atlas.shapes[shape, side, style]
        h, w = mask.shape
        top = int(cell) // columns * CELL + int(rng.integers(0, CELL - h))
        left = int(cell) % columns * CELL + int(rng.integers(0, CELL - w))
        paste(canvas, mask, ink, top, left)
    picture = finish(rng, canvas)
    if one and n > 1 and rng.random() < 0.15:
        return [picture], WHAT[int(rng.integers(len(WHAT)))], f"{n} {names[0]} {PLURALS[shape]}."
    return [picture], MANY[int(rng.integers(len(MANY)))].format(p=PLURALS[shape]), str(n)


def two(rng, atlas, size, kept=False):
    """Two pictures with a number each."""
    values = [some_number(rng, kept, int(rng.integers(1, 3))) for _ in range(2)]
    pictures = [number(rng, atlas, size, v) for v in values]
    return pictures, "What numbers are in the pictures?", f"{values[0]} and {values[1]}"


# task → (function, share of the mixed picture batches).
TASKS = {"read": (read, 0.62), "name": (named, 0.19), "count": (counted, 0.19), "two": (two, 0.0)}
# (height, width) of a batch's pictures → share.
PICTURE_SIZES = {(64, 64): 0.86, (64, 96): 0.06, (96, 64): 0.03, (32, 96): 0.03, (96, 32): 0.02}


def draw(rng: np.random.Generator, atlas: Atlas, size):
    """A task's name, pictures, question and answer."""
    names = list(TASKS)
    shares = np.array([TASKS[n][1] for n in names])
    name = names[int(rng.choice(len(names), p=shares / shares.sum()))]
    return name, *TASKS[name][0](rng, atlas, size)
