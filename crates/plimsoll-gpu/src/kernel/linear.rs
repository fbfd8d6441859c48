//! Kernels over packed matrices (`plimsoll_kernels::packing` has their layout): products with rows, and single rows.
//!
//! A workgroup computes the 16 outputs of a panel for some rows. Sixteen threads with one output each are a slice. Slices share the
//! inputs, whole blocks at a time, and one thread adds up their sums in order. A row's outputs depend on nothing but the row.

use plimsoll_kernels::{BLOCK, PANEL, PackKind, PackScales, QuantPacking, SUPER};

use super::LINEAR_ROWS;

/// `rows` rows of `k` inputs at `x` give rows of `width` outputs at `out`. A piece of `panels` panels computes the outputs from `first`
/// on, at most `outputs`. The piece is at `w` of its segment. `bias` is 0, or 1 more than the bias's offset. `add`: adds to the elements
/// there.
pub const LINEAR: &[&str] = &["x", "out", "rows", "k", "width", "first", "outputs", "w", "panel_words", "bias", "add"];

/// `rows` rows of `k` elements at `out`: the matrix's rows for the tokens at `tokens`, if they are among the piece's `outputs` rows from
/// `first` on. `blend`: four tokens per row, followed by the share of each; their sum is added to the row.
pub const EMBED: &[&str] = &["out", "rows", "k", "tokens", "first", "outputs", "w", "panel_words", "scale_f", "blend"];

/// Rows of `k` inputs at `x` and of `width` outputs at `out`, one row per choice, multiplied by the matrix of the chosen expert.
/// The lookup table has three words for every matrix of an expert, from number `first_id` on: the segment and the number of the packing,
/// its offset, and 0 or 1 more than its bias's offset. Another dispatch serves matrices with another first word than `segment`.
/// `order` and `blocks` are those of [`super::experts::GROUP`]; `share` choices have one row of inputs.
pub const EXPERTS: &[&str] = &[
    "x",
    "out",
    "k",
    "width",
    "outputs",
    "panel_words",
    "order",
    "blocks",
    "share",
    "segment",
    "first_id",
    "first_block",
];

/// Slices of a workgroup.
pub(super) const SLICES: usize = 8;

/// Elements of a float matrix that a slice takes at once.
pub(super) const RUN: usize = 8;

/// Threads of a workgroup that computes products.
const LINEAR_THREADS: usize = SLICES * PANEL;

/// The bit planes of codes: the width of each, and its lowest bit in the code.
pub(super) fn planes(bits: u8) -> Vec<(u8, u8)> {
    let mut position = 0;
    let of = |plane: &u8| {
        position += plane;
        (*plane, position - plane)
    };
    [8u8, 4, 2, 1].iter().filter(|plane| bits & **plane != 0).map(of).collect()
}

/// Returns the place of a quad in a plane: the vector of 64 bytes, and the lowest bit within each byte.
fn place(plane: u8, quad: usize) -> (usize, usize) {
    match plane {
        8 => (quad, 0),
        4 => (quad % 4, quad / 4 * 4),
        2 => (quad / 4, quad % 4 * 2),
        _ => (0, quad),
    }
}

/// Returns the place of the quad `quad`, as expressions.
pub(super) fn place_of_quad(plane: u8) -> (&'static str, &'static str) {
    match plane {
        8 => ("quad", "0u"),
        4 => ("quad % 4u", "quad / 4u * 4u"),
        2 => ("quad / 4u", "quad % 4u * 2u"),
        _ => ("0u", "quad"),
    }
}

/// Returns the words of a block's codes, for all lanes.
pub(super) fn block_words(bits: u8) -> usize {
    BLOCK * PANEL * usize::from(bits) / 32
}

/// Returns functions that read the scales and offsets of a panel with scales at `at`.
fn scales(quant: QuantPacking) -> String {
    let parts = 1 + usize::from(quant.offset);
    let groups = SUPER / usize::from(quant.group);
    let half = |at: String| format!("unpack2x16float(weights[{at} + lane / 2u])[lane & 1u]");
    let float = |at: String| format!("bitcast<f32>(weights[{at} + lane])");
    let byte = |at: String| format!("((weights[{at} + lane / 4u] >> (8u * (lane & 3u))) & 255u)");
    let (scale, offset) = match quant.scales {
        PackScales::F16 => {
            let at = format!("at + g * {}u", parts * PANEL / 2);
            (half(at.clone()), half(format!("{at} + {}u", PANEL / 2)))
        }
        PackScales::F32 => {
            let at = format!("at + g * {}u", parts * PANEL);
            (float(at.clone()), float(format!("{at} + {PANEL}u")))
        }
        PackScales::E8m0Half => (format!("power({})", byte(format!("at + g * {}u", PANEL / 4))), "0.0".into()),
        PackScales::Ue4m3Half => (format!("small({})", byte(format!("at + g * {}u", PANEL / 4))), "0.0".into()),
        PackScales::Super | PackScales::SuperF32 => {
            let words = if quant.scales == PackScales::Super { PANEL / 2 } else { PANEL };
            let all = parts * (words + groups * PANEL / 4);
            let base = format!("at + g / {groups}u * {all}u");
            let bytes = |part: usize| {
                byte(format!(
                    "{base} + {}u + g % {groups}u * {}u",
                    parts * words + part * groups * PANEL / 4,
                    PANEL / 4
                ))
            };
            let factor = |part: usize| match quant.scales {
                PackScales::Super => half(format!("{base} + {}u", part * words)),
                _ => float(format!("{base} + {}u", part * words)),
            };
            let signed = format!("f32(bitcast<i32>({} << 24u) >> 24u)", bytes(0));
            (format!("{} * {signed}", factor(0)), format!("-({} * f32({}))", factor(1), bytes(1)))
        }
    };
    let text = "
fn power(e: u32) -> f32 {
    // 2^(e - 128); what a normal number does not hold is 0.
    return select(0.0, bitcast<f32>((e - 1u) << 23u), e > 1u);
}
fn small(b: u32) -> f32 {
    // Half of a number of 4 bits of exponent, biased by 7, and 3 of mantissa.
    let e = b >> 3u;
    let m = f32(b & 7u) * 0.125;
    return select((1.0 + m) * bitcast<f32>((e + 119u) << 23u), m * 0.0078125, e == 0u);
}
fn scale_of(at: u32, lane: u32, g: u32) -> f32 {
    return $SCALE;
}
fn offset_of(at: u32, lane: u32, g: u32) -> f32 {
    return $OFFSET;
}
";
    let offset = if quant.offset { offset } else { "0.0".into() };
    text.replace("$SCALE", &scale).replace("$OFFSET", &offset)
}

/// Returns the table of levels, if codes have a codebook.
fn book(quant: QuantPacking) -> String {
    let Some(book) = quant.codebook else { return String::new() };
    let levels: Vec<String> = book.iter().map(|level| format!("{level}.0")).collect();
    format!("\nvar<private> book: array<f32, 16> = array<f32, 16>({});\n", levels.join(", "))
}

/// Returns the expression of a level less the zero point, as a float; `code` is an expression.
pub(super) fn level(quant: QuantPacking, code: &str) -> String {
    match quant.codebook {
        Some(_) => format!("(book[{code}] - {}.0)", quant.zero),
        None if quant.zero == 0 => format!("f32({code})"),
        None => format!("f32(i32({code}) - {})", quant.zero),
    }
}

/// Returns a function that reads one element of the matrix: of the panel at `panel`, in lane `lane`, element `k`.
pub(super) fn element(kind: PackKind) -> String {
    let body = match kind {
        PackKind::F32 => format!("return bitcast<f32>(weights[panel + k * {PANEL}u + lane]);"),
        PackKind::F16 => "return unpack2x16float(weights[panel + k * 8u + lane / 2u])[lane & 1u];".into(),
        PackKind::Bf16 => "let pair = weights[panel + k * 8u + lane / 2u];
    return bitcast<f32>(select(pair << 16u, pair & 0xffff0000u, (lane & 1u) == 1u));"
            .into(),
        PackKind::F8 { group } => format!(
            "let code = (weights[panel + k * 4u + lane / 4u] >> (8u * (lane & 3u))) & 255u;
    let half = ((code & 128u) << 8u) | ((code & 127u) << 7u);
    let scales = panel + (p.k + 3u) / 4u * 16u;
    return unpack2x16float(half).x * bitcast<f32>(weights[scales + k / {group}u * {PANEL}u + lane]);"
        ),
        PackKind::Quant(quant) => {
            let mut code = String::from("var code = 0u;\n");
            let mut base = 0;
            for (plane, position) in planes(quant.bits) {
                let mask = (1u32 << plane) - 1;
                let (vector, bit) = place_of_quad(plane);
                code += &format!(
                    "    code |= ((weights[block + {base}u + ({vector}) * 16u + lane] >> (8u * byte + {bit})) & {mask}u) << {position}u;\n"
                );
                base += usize::from(plane) * 16;
            }
            let group = quant.group;
            let add = if quant.offset { " + offset_of(scales, lane, g)" } else { "" };
            format!(
                "let block = panel + k / 32u * {}u;
    let quad = k % 32u / 4u;
    let byte = k % 4u;
    {code}    let g = k / {group}u;
    let scales = panel + p.k / 32u * {}u;
    return scale_of(scales, lane, g) * {}{add};",
                block_words(quant.bits),
                block_words(quant.bits),
                level(quant, "code")
            )
        }
    };
    format!("\nfn element(panel: u32, lane: u32, k: u32) -> f32 {{\n    {body}\n}}\n")
}

pub(super) fn reading(kind: PackKind) -> String {
    match kind {
        PackKind::Quant(quant) => scales(quant) + &book(quant),
        _ => String::new(),
    }
}

pub(super) fn embed(kind: PackKind) -> String {
    // A row before the piece's first one wraps around to a great number.
    let main = "
fn of_row(row: u32, k: u32) -> f32 {
    return element(p.w + row / 16u * p.panel_words, row % 16u, k);
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let parts = (p.k + 63u) / 64u;
    let part = group.y * $WIDTHu + group.x;
    let made = part / parts;
    let k = part % parts * 64u + thread;
    if (made >= p.rows || k >= p.k) {
        return;
    }
    let out = p.out + made * p.k + k;
    if (p.blend == 0u) {
        let row = sent[p.tokens + made] - p.first;
        if (row < p.outputs) {
            arena[out] = of_row(row, k) * p.scale_f;
        }
        return;
    }
    var sum = 0.0;
    for (var i = 0u; i < 4u; i++) {
        let row = sent[p.tokens + made * 8u + i] - p.first;
        let share = bitcast<f32>(sent[p.tokens + made * 8u + 4u + i]);
        if (share != 0.0 && row < p.outputs) {
            sum = fma(share, of_row(row, k), sum);
        }
    }
    arena[out] = arena[out] + sum;
}
";
    reading(kind) + &element(kind) + &super::sized(main)
}

/// Returns the quads of a block's codes as levels: `let c0 = vec4<f32>(…)`, …
fn levels(quant: QuantPacking) -> String {
    let mut text = String::new();
    let words = block_words(quant.bits) / PANEL;
    for word in 0..words {
        text += &format!("let w{word} = weights[at + {}u];\n", word * PANEL);
    }
    for quad in 0..BLOCK / 4 {
        let codes = (0..4).map(|byte| {
            let mut base = 0;
            let part = |(plane, position): (u8, u8)| {
                let (vector, bit) = place(plane, quad);
                let word = base + vector;
                base += usize::from(plane);
                let (down, mask) = (8 * byte + bit, (1u32 << plane) - 1);
                format!("(((w{word} >> {down}u) & {mask}u) << {position}u)")
            };
            let parts: Vec<String> = planes(quant.bits).into_iter().map(part).collect();
            level(quant, &parts.join(" | "))
        });
        text += &format!("let c{quad} = vec4<f32>({});\n", codes.collect::<Vec<_>>().join(", "));
    }
    text
}

/// Returns a slice's loop over its blocks. A block has one or two groups, or is a part of one.
fn quantized(quant: QuantPacking) -> String {
    let group = usize::from(quant.group);
    let (groups, quads) = (BLOCK.div_ceil(group), group.min(BLOCK) / 4);
    let mut text = format!("let at = codes + b * {}u + lane;\n{}", block_words(quant.bits), levels(quant));
    for g in 0..groups {
        let stored = match group > BLOCK {
            true => format!("b / {}u", group / BLOCK),
            false => format!("b * {groups}u + {g}u"),
        };
        text += &format!("let s{g} = scale_of(scales, lane, {stored});\n");
        if quant.offset {
            text += &format!("let o{g} = offset_of(scales, lane, {stored});\n");
        }
    }
    for row in 0..LINEAR_ROWS {
        let mut body = format!("let x = in{row} + b * 32u;\n");
        for g in 0..groups {
            body += &format!("var d{g} = vec4<f32>();\nvar t{g} = vec4<f32>();\n");
            for quad in g * quads..(g + 1) * quads {
                let at = |i: usize| format!("arena[x + {}u]", quad * 4 + i);
                body += &format!("let x{quad} = vec4<f32>({}, {}, {}, {});\n", at(0), at(1), at(2), at(3));
                body += &format!("d{g} = fma(c{quad}, x{quad}, d{g});\n");
                if quant.offset {
                    body += &format!("t{g} = t{g} + x{quad};\n");
                }
            }
            body += &format!("sum{row} = fma(s{g}, (d{g}.x + d{g}.y) + (d{g}.z + d{g}.w), sum{row});\n");
            if quant.offset {
                body += &format!("sum{row} = fma(o{g}, (t{g}.x + t{g}.y) + (t{g}.z + t{g}.w), sum{row});\n");
            }
        }
        text += &format!("if (rows > {row}u) {{\n{body}}}\n");
    }
    text
}

/// Returns a slice's loop over its runs, for a matrix of floats.
fn floats(kind: PackKind) -> String {
    let mut text = format!("let run = b * {RUN}u;\n");
    for i in 0..RUN {
        text += &format!("let c{i} = element(panel, lane, run + {i}u);\n");
    }
    let _ = kind;
    for row in 0..LINEAR_ROWS {
        let mut body = format!("let x = in{row} + run;\n");
        for i in 0..RUN {
            body += &format!("sum{row} = fma(c{i}, arena[x + {i}u], sum{row});\n");
        }
        text += &format!("if (rows > {row}u) {{\n{body}}}\n");
    }
    text
}

/// Returns the first slice's products with the last elements, which do not fill a run.
fn rest() -> String {
    let mut each = String::new();
    for row in 0..LINEAR_ROWS {
        each += &format!("if (rows > {row}u) {{ sum{row} = fma(c, arena[in{row} + k], sum{row}); }}\n");
    }
    format!(
        "if (slice == 0u && mine) {{\nfor (var k = p.k / {RUN}u * {RUN}u; k < p.k; k++) {{\nlet c = element(panel, lane, k);\n{each}}}\n}}\n"
    )
}

/// The rows and the matrix of a dispatch of [`LINEAR`].
const DENSE: &str = "let row = group.y * $ROWSu;
    let rows = min($ROWSu, p.rows - row);
    let mine = true;
    let first = p.first;
    let panel = p.w + group.x * p.panel_words;
    let bias = p.bias;
";

/// The rows and the matrix of a block of choices with one expert. Values read from the arena decide no branch around a barrier.
const GROUPED: &str = "let entry = p.blocks + (group.y + p.first_block) * 3u;
    let rows = u32(arena[entry + 2u]);
    let id = (p.first_id + u32(arena[entry])) * 3u;
    let mine = rows > 0u && lookup[id] == p.segment;
    let order = p.order + u32(arena[entry + 1u]);
    let first = 0u;
    let panel = lookup[id + 1u] + group.x * p.panel_words;
    let bias = lookup[id + 2u];
";

pub(super) fn linear(kind: PackKind) -> String {
    let head = DENSE.to_owned() + "$INPUTS";
    products(kind, &head, "let in$R = p.x + (row + $Ru) * p.k;\n    ", "row + made")
        .replace("$ADD", "if (p.add != 0u) {\n        sum = sum + arena[out];\n    }")
}

pub(super) fn experts(kind: PackKind) -> String {
    let head = GROUPED.to_owned() + "$INPUTS";
    let input = "var in$R = 0u;
    if (rows > $Ru) { in$R = p.x + u32(arena[order + $Ru]) / p.share * p.k; }\n    ";
    products(kind, &head, input, "u32(arena[order + made])").replace("$ADD", "")
}

/// Returns the kernel: `head` is its beginning, `input` the code for the place of a row's inputs, `row` that for a row's number.
fn products(kind: PackKind, head: &str, input: &str, row: &str) -> String {
    let (block, body, rest) = match kind {
        PackKind::Quant(quant) => (BLOCK, quantized(quant), String::new()),
        _ => (RUN, floats(kind), rest()),
    };
    let code_words = match kind {
        PackKind::Quant(quant) => block_words(quant.bits),
        _ => 0,
    };
    let each = |text: &str| (0..LINEAR_ROWS).map(|row| text.replace("$R", &row.to_string())).collect::<String>();
    let main = "
var<workgroup> parts: array<f32, $ALL>;
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread & 15u;
    let slice = thread / 16u;
    $HEAD
    let codes = panel;
    let scales = panel + p.k / 32u * $CODESu;
    $SUMS
    let end = select(0u, p.k / $BLOCKu, mine);
    for (var b = slice; b < end; b += $SLICESu) {
        $BODY
    }
    $REST
    $PARTS
    workgroupBarrier();
    let made = thread / 16u;
    let output = first + group.x * 16u + lane;
    if (!mine || made >= rows || output >= first + p.outputs) {
        return;
    }
    var sum = parts[made * $THREADSu + lane];
    for (var s = 1u; s < $SLICESu; s++) {
        sum = sum + parts[made * $THREADSu + s * 16u + lane];
    }
    if (bias != 0u) {
        sum = sum + vectors[bias - 1u + output];
    }
    let out = p.out + ($ROW_MADE) * p.width + output;
    $ADD
    arena[out] = sum;
}
";
    let main = main.replace("$HEAD", head).replace("$INPUTS", &each(input)).replace("$ROW_MADE", row);
    let main = main.replace("$BODY", &body).replace("$REST", &rest);
    let main = main.replace("$SUMS", &each("var sum$R = 0.0;\n    "));
    let main = main.replace("$PARTS", &each(&format!("parts[$Ru * {LINEAR_THREADS}u + thread] = sum$R;\n    ")));
    let main = main.replace("$ALL", &(LINEAR_ROWS as usize * LINEAR_THREADS).to_string());
    let main = main.replace("$THREADS", &LINEAR_THREADS.to_string()).replace("$SLICES", &SLICES.to_string());
    let main = main.replace("$ROWS", &LINEAR_ROWS.to_string()).replace("$BLOCK", &block.to_string());
    let main = main.replace("$CODES", &code_words.to_string());
    let element = if matches!(kind, PackKind::Quant(_)) { String::new() } else { element(kind) };
    reading(kind) + &element + &main
}

const _: () = assert!(LINEAR_THREADS >= LINEAR_ROWS as usize * PANEL, "a thread for every output of a group's rows");
