//! Products of many rows with a packed matrix: a workgroup decodes each weight once for all rows of its tile.
//!
//! A tile is 32 rows by 64 outputs; a thread computes 4 by 4 of them. A row gets the same bits as in [`super::linear`]: each slice's sums
//! in that kernel are computed here one slice after the other, in the same order, and every product is an explicit `fma`.

use plimsoll_kernels::{BLOCK, PANEL, PackKind, QuantPacking};

use super::linear::{RUN, SLICES, block_words, element, level, place_of_quad, planes, reading};
use super::{TILE_PANELS, TILE_ROWS};

/// Elements of a row that are decoded at once.
const STEP: usize = 32;

/// Outputs of a thread, and rows.
const OWN: usize = 4;

/// Threads side by side along the outputs, and along the rows.
const ACROSS: usize = TILE_PANELS * PANEL / OWN;
const DOWN: usize = TILE_ROWS as usize / OWN;

const _: () = assert!(STEP == BLOCK && STEP.is_multiple_of(RUN), "a step is a block, or whole runs");
const _: () = assert!(DOWN * OWN == STEP, "a thread decodes one quad of its outputs");

const _: () = assert!(STEP * (ACROSS + DOWN + 1) * 16 + 4 * ACROSS * 16 <= 16 << 10, "memory of a workgroup");

/// Text for each row of a thread.
fn each(text: &str) -> String {
    (0..OWN).map(|row| text.replace("$R", &row.to_string())).collect()
}

/// Returns the code for one element of the thread's rows and outputs. It adds the products to `to0`, …, and the inputs to
/// `inputs`, if named.
fn multiply(k: usize, to: &str, inputs: Option<&str>) -> String {
    let xyzw = ["x", "y", "z", "w"];
    let mut text = format!("{{ let w = ws[{k}][across]; let x = xs[{k}][down];\n");
    for (row, of) in xyzw.iter().enumerate() {
        text += &format!("{to}{row} = fma(w, vec4<f32>(x.{of}), {to}{row});\n");
    }
    if let Some(inputs) = inputs {
        text += &format!("{inputs} = {inputs} + x;\n");
    }
    text + "}\n"
}

/// Returns the products of a step with levels, which are scaled by group. The four elements of a quad have a sum each, as in
/// [`super::linear`].
fn quantized_products(quant: QuantPacking) -> String {
    let group = usize::from(quant.group).min(BLOCK);
    let mut text = String::new();
    for g in 0..BLOCK / group {
        text += "{\n";
        for part in 0..4 {
            text += &each(&format!("var d{part}$R = vec4<f32>();\n"));
            text += &format!("var t{part} = vec4<f32>();\n");
            let inputs = format!("t{part}");
            for k in (g * group + part..(g + 1) * group).step_by(4) {
                text += &multiply(k, &format!("d{part}"), quant.offset.then_some(inputs.as_str()));
            }
        }
        text += &format!("let scale = scales_of[{g}][across];\n");
        text += &each("sum$R = fma(scale, (d0$R + d1$R) + (d2$R + d3$R), sum$R);\n");
        if quant.offset {
            text += &format!("let offset = offsets_of[{g}][across];\nlet inputs = (t0 + t1) + (t2 + t3);\n");
            text += &each("sum$R = fma(offset, vec4<f32>(inputs[$R]), sum$R);\n");
        }
        text += "}\n";
    }
    text
}

/// Returns the code that decodes a quad of four outputs, and the scales of the block's groups.
fn quantized_weights(quant: QuantPacking) -> String {
    let mut text = format!("let at = panel + b * {}u + lane;\n", block_words(quant.bits));
    let mut base = 0;
    for (plane, _) in planes(quant.bits) {
        let (vector, bit) = place_of_quad(plane);
        for i in 0..OWN {
            text += &format!("let p{plane}{i} = weights[at + {base}u + ({vector}) * 16u + {i}u] >> ({bit});\n");
        }
        base += usize::from(plane) * PANEL;
    }
    for byte in 0..4 {
        let of = |i: usize| {
            let part = |(plane, position): (u8, u8)| {
                format!("(((p{plane}{i} >> {}u) & {}u) << {position}u)", 8 * byte, (1u32 << plane) - 1)
            };
            level(quant, &planes(quant.bits).into_iter().map(part).collect::<Vec<_>>().join(" | "))
        };
        text += &format!(
            "ws[quad * 4u + {byte}u][across] = vec4<f32>({});\n",
            (0..OWN).map(of).collect::<Vec<_>>().join(", ")
        );
    }
    let group = usize::from(quant.group);
    let groups = BLOCK.div_ceil(group);
    let stored = match group > BLOCK {
        true => format!("b / {}u", group / BLOCK),
        false => format!("b * {groups}u + quad"),
    };
    let four = |name: &str| {
        let one = |i: usize| format!("{name}(scales, lane + {i}u, g)");
        (0..OWN).map(one).collect::<Vec<_>>().join(", ")
    };
    text += &format!("if (quad < {groups}u) {{\nlet g = {stored};\n");
    text += &format!("scales_of[quad][across] = vec4<f32>({});\n", four("scale_of"));
    if quant.offset {
        text += &format!("offsets_of[quad][across] = vec4<f32>({});\n", four("offset_of"));
    }
    text + "}\n"
}

/// Returns the code beside the function, the steps of a slice, a step's index `k`, and the two halves of a step.
fn parts(kind: PackKind) -> [String; 5] {
    if let PackKind::Quant(quant) = kind {
        let groups = BLOCK.div_ceil(usize::from(quant.group));
        let own = |name: &str| format!("var<workgroup> {name}: array<array<vec4<f32>, {ACROSS}>, {groups}>;\n");
        let mut shared = own("scales_of");
        if quant.offset {
            shared += &own("offsets_of");
        }
        let steps = format!(
            "let scales = panel + p.k / {BLOCK}u * {}u;\nlet steps = (p.k / {BLOCK}u + {}u - s) / {SLICES}u;\n",
            block_words(quant.bits),
            SLICES - 1
        );
        let k = format!("let b = s + i * {SLICES}u;\nlet k = b * {BLOCK}u + slot;\n");
        return [shared, steps, k, quantized_weights(quant), quantized_products(quant)];
    }
    // A slice has every eighth run, and the first one also the last elements. Excess elements of a step change no sum: they add -0.
    let shared = format!(
        "
fn element_of(s: u32, runs: u32, at: u32) -> u32 {{
    if (at < runs * {RUN}u) {{
        return (at / {RUN}u * {SLICES}u + s) * {RUN}u + at % {RUN}u;
    }}
    let k = p.k / {RUN}u * {RUN}u + (at - runs * {RUN}u);
    return select(p.k, min(k, p.k), s == 0u);
}}
fn weight_at(panel: u32, lane: u32, k: u32) -> f32 {{
    if (k >= p.k) {{
        return -0.0;
    }}
    return element(panel, lane, k);
}}
"
    );
    let steps = format!(
        "let runs = (p.k / {RUN}u + {}u - s) / {SLICES}u;
        let steps = (runs * {RUN}u + select(0u, p.k % {RUN}u, s == 0u) + {}u) / {STEP}u;\n",
        SLICES - 1,
        STEP - 1
    );
    let k = format!("let k = element_of(s, runs, i * {STEP}u + slot);\n");
    let four = (0..OWN).map(|i| format!("weight_at(panel, lane + {i}u, own)")).collect::<Vec<_>>().join(", ");
    let weights = format!(
        "for (var j = quad * 4u; j < quad * 4u + 4u; j++) {{
            let own = element_of(s, runs, i * {STEP}u + j);
            ws[j][across] = vec4<f32>({four});
        }}\n"
    );
    let products = (0..STEP).map(|k| multiply(k, "sum", None)).collect();
    [element(kind) + &shared, steps, k, weights, products]
}

/// The rows and the matrix of a dispatch.
const DENSE: &str = "let row = group.y * $ROWSu;
    let n = min($ROWSu, p.rows - row);
    let matrix = p.w;
    let first = p.first;
    let bias = p.bias;
    let add = p.add != 0u;
";

/// The rows and the matrix of a block of choices with one expert. Only values that all threads read at once may decide a
/// branch around a barrier.
const GROUPED: &str = "let entry = p.blocks + (group.y + p.first_block) * 3u;
    let id = (p.first_id + u32(arena[entry])) * 3u;
    if (thread == 0u) {
        block_rows = select(0u, u32(arena[entry + 2u]), lookup[id] == p.segment);
    }
    let n = workgroupUniformLoad(&block_rows);
    if (n == 0u) {
        return;
    }
    let order = p.order + u32(arena[entry + 1u]);
    let matrix = lookup[id + 1u];
    let first = 0u;
    let bias = lookup[id + 2u];
    let add = false;
";

/// The kernel. One unused column keeps neighbours in different banks.
const MAIN: &str = "
var<workgroup> ws: array<array<vec4<f32>, $ACROSS>, $STEP>;
var<workgroup> xs: array<array<vec4<f32>, $COLUMNS>, $STEP>;
fn input(row: u32, k: u32) -> f32 {
    if (k >= p.k) {
        return 0.0;
    }
    return arena[row + k];
}
fn store(row: u32, output: u32, made: f32, bias: u32, add: bool) {
    var sum = made;
    if (bias != 0u) {
        sum = sum + vectors[bias - 1u + output];
    }
    let out = p.out + row * p.width + output;
    if (add) {
        sum = sum + arena[out];
    }
    arena[out] = sum;
}
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let across = thread % $ACROSSu;
    let down = thread / $ACROSSu;
    let quad = down;
    let slot = thread % $STEPu;
    $HEAD
    let last = n - 1u;
    let panel = matrix + min(group.x * $PANELSu + across / 4u, (p.outputs - 1u) / 16u) * p.panel_words;
    let lane = across % 4u * 4u;
    let used = down * 4u < n;
    $TOTALS
    for (var s = 0u; s < $SLICESu; s++) {
        $SUMS
        $STEPS
        for (var i = 0u; i < steps; i++) {
            $K
            $WEIGHTS
            for (var r = thread / $STEPu * 4u; r < n; r += $APARTu) {
                xs[slot][r / 4u] = vec4<f32>($INPUTS);
            }
            workgroupBarrier();
            if (used) {
                $PRODUCTS
            }
            workgroupBarrier();
        }
        if (s == 0u) {
            $FIRST
        } else {
            $NEXT
        }
    }
    if (used) {
        let output = (group.x * $ACROSSu + across) * 4u;
        for (var i = 0u; i < min(4u, p.outputs - min(output, p.outputs)); i++) {
            $STORES
        }
    }
}
";

pub(super) fn linear(kind: PackKind) -> String {
    products(kind, DENSE, ["p.x + (row + $N) * p.k", "row + $N"])
}

pub(super) fn experts(kind: PackKind) -> String {
    let row = "u32(arena[order + $N])";
    let text = products(kind, GROUPED, [&format!("p.x + {row} / p.share * p.k"), row]);
    "var<workgroup> block_rows: u32;\n".to_owned() + &text
}

/// Returns the kernel: `head` is its beginning, `input` the place of a row's inputs, and `made` its number among the outputs.
fn products(kind: PackKind, head: &str, [input, made]: [&str; 2]) -> String {
    let [shared, steps, k, weights, products] = parts(kind);
    let threads = ACROSS * DOWN;
    let main = MAIN.replace("$STEPS", &steps).replace("$K", &k).replace("$WEIGHTS", &weights);
    let main = main.replace("$PRODUCTS", &products).replace("$SUMS", &each("var sum$R = vec4<f32>();\n"));
    let main = main.replace("$TOTALS", &each("var total$R = vec4<f32>();\n"));
    let main = main.replace("$FIRST", &each("total$R = sum$R;\n"));
    let main = main.replace("$NEXT", &each("total$R = total$R + sum$R;\n"));
    let stored = made.replace("$N", "(down * 4u + $Ru)");
    let store = format!("if (down * 4u + $Ru < n) {{ store({stored}, first + output + i, total$R[i], bias, add); }}\n");
    let main = main.replace("$STORES", &each(&store));
    let of = |i: usize| format!("input({}, k)", input.replace("$N", &format!("min(r + {i}u, last)")));
    let main = main.replace("$INPUTS", &(0..OWN).map(of).collect::<Vec<_>>().join(", ")).replace("$HEAD", head);
    let main = main.replace("$ACROSS", &ACROSS.to_string()).replace("$COLUMNS", &(DOWN + 1).to_string());
    let main = main.replace("$STEP", &STEP.to_string()).replace("$SLICES", &SLICES.to_string());
    let main = main.replace("$ROWS", &TILE_ROWS.to_string()).replace("$PANELS", &TILE_PANELS.to_string());
    let main = main.replace("$APART", &(threads / STEP * OWN).to_string()).replace("$THREADS", &threads.to_string());
    reading(kind) + &shared + &main
}
