//! Fused operations of the device against the separate steps: not a bit may differ.

use crate::common::random::Random;
use crate::common::{checkpoint, device, matrix, rows, shape};
use plimsoll_device::{
    Activation, Buf, ComputeDtype, CpuDevice, Declare, Device, DtypePolicy, FeedForward, Input, Isa, LinearId, Mode,
    VectorId,
};

const MODELS: [&str; 3] = ["llama", "llama-bf16", "gguf-llama-q4_0"];
/// Widths of the fixtures.
const HIDDEN: usize = 64;
const WIDTH: usize = 128;
const EPS: f32 = 1e-5;

/// Part of a fixture's first layer.
struct Layer {
    norm: VectorId,
    attention: [(LinearId, usize); 3],
    feed_forward: FeedForward,
}

fn load(name: &str, dtype: ComputeDtype, threads: usize, isa: Isa) -> (CpuDevice, Layer) {
    let checkpoint = checkpoint(name);
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let norm = declare.vector("model.layers.0.input_layernorm.weight", HIDDEN, 0.0).unwrap();
    let mut linear = |name: &str, out, k| declare.linear(&format!("model.layers.0.{name}.weight"), out, k).unwrap();
    let attention = [("q_proj", HIDDEN), ("k_proj", HIDDEN / 2), ("v_proj", HIDDEN / 2)];
    let attention = attention.map(|(name, out)| (linear(&format!("self_attn.{name}"), out, HIDDEN), out));
    let feed_forward = FeedForward {
        gate: linear("mlp.gate_proj", WIDTH, HIDDEN),
        up: linear("mlp.up_proj", WIDTH, HIDDEN),
        down: linear("mlp.down_proj", HIDDEN, WIDTH),
        width: WIDTH,
        act: Activation::Silu,
    };
    let table = declare.finish().on(isa).computed_in(dtype);
    let shape = table.shaped(shape(None));
    let device = device(&table, &checkpoint, &shape, 0, threads, isa);
    (device, Layer { norm, attention, feed_forward })
}

/// Returns the results of `run` for `count` random rows. `run` gets the rows, and a buffer of the same size for the normed ones.
fn results(
    (device, layer): &mut (CpuDevice, Layer),
    count: usize,
    run: impl FnOnce(&mut CpuDevice, &Layer, Buf, Buf) -> Vec<Buf>,
) -> Vec<Vec<Vec<u32>>> {
    let scope = device.mark();
    let mut random = Random::new(count as u64);
    let input: Vec<_> = (0..count).map(|_| random.floats(HIDDEN)).collect();
    let from = matrix(device, &input);
    let x = device.temp(count, HIDDEN).unwrap();
    let out = run(device, layer, from, x);
    let out = out.into_iter().map(|out| rows(device, out)).collect();
    device.release(scope);
    out
}

/// Calls `check` for every fixture, arithmetic, number of rows, and number of rows in bfloat16.
fn each(mut check: impl FnMut(&mut (CpuDevice, Layer), usize, usize)) {
    for (model, dtype) in MODELS.iter().flat_map(|m| [ComputeDtype::Auto, ComputeDtype::Int8].map(|d| (m, d))) {
        let mut loaded = load(model, dtype, 2, Isa::detect());
        for (count, bf16) in [(1, 0), (5, 0), (40, 0), (40, 33), (40, 40), (1, 1)] {
            check(&mut loaded, count, bf16);
        }
    }
}

#[test]
fn a_norm_and_the_layers_behind_it() {
    each(|loaded, count, bf16| {
        let outs = |device: &mut CpuDevice, layer: &Layer| {
            layer.attention.map(|(id, cols)| (id, device.temp(count, cols).unwrap()))
        };
        let together = results(loaded, count, |device, layer, from, x| {
            let outs = outs(device, layer);
            let input = Input::normed(x, from, layer.norm, EPS);
            device.linear_rows(input, &outs, Mode::Store, bf16).unwrap();
            outs.map(|(_, out)| out).to_vec()
        });
        let steps = results(loaded, count, |device, layer, from, x| {
            let outs = outs(device, layer);
            device.rms_norm(x, from, layer.norm, EPS);
            device.linear_rows(x.into(), &outs, Mode::Store, bf16).unwrap();
            outs.map(|(_, out)| out).to_vec()
        });
        assert_eq!(together, steps, "{count} rows, {bf16} rounded");
    });
}

#[test]
fn a_feed_forward_layer() {
    each(|loaded, count, bf16| {
        let together = results(loaded, count, |device, layer, from, x| {
            let input = Input::normed(x, from, layer.norm, EPS);
            device.feed_forward(&layer.feed_forward, input, from, Mode::Add, bf16).unwrap();
            vec![from]
        });
        let steps = results(loaded, count, |device, layer, from, x| {
            let FeedForward { gate, up, down, width, act } = layer.feed_forward;
            device.rms_norm(x, from, layer.norm, EPS);
            let (gates, ups) = (device.temp(count, width).unwrap(), device.temp(count, width).unwrap());
            device.linear_rows(x.into(), &[(gate, gates), (up, ups)], Mode::Store, bf16).unwrap();
            device.glu_for(down, gates, ups, act, bf16);
            device.linear_rows(gates.into(), &[(down, from)], Mode::Add, bf16).unwrap();
            vec![from]
        });
        assert_eq!(together, steps, "{count} rows, {bf16} rounded");
    });
}

#[test]
fn bf16_rows_exist_where_amx_is() {
    for model in &MODELS[1..] {
        let mut loaded = load(model, ComputeDtype::Auto, 2, Isa::detect());
        let [exact, bf16] = [0, 40].map(|bf16| {
            results(&mut loaded, 40, |device, layer, from, _| {
                let out = device.temp(40, HIDDEN).unwrap();
                device.linear_rows(from.into(), &[(layer.attention[0].0, out)], Mode::Store, bf16).unwrap();
                vec![out]
            })
        });
        assert_eq!(exact != bf16, Isa::detect() == Isa::Amx, "{model}");
    }
}

#[test]
fn a_row_is_what_it_is_alone_however_many_threads_divide_rows_or_outputs() {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available() && *isa != Isa::Portable);
    for (isa, model) in isas.flat_map(|isa| MODELS.map(|model| (isa, model))) {
        let run = |(device, layer): &mut (CpuDevice, Layer), input: &[Vec<f32>]| {
            let scope = device.mark();
            let x = matrix(device, input);
            let outs = layer.attention.map(|(id, cols)| (id, device.temp(x.rows, cols).unwrap()));
            device.linear(x, &outs, Mode::Store).unwrap();
            let out = outs.map(|(_, out)| rows(device, out));
            device.release(scope);
            out
        };
        let mut random = Random::new(7);
        let input: Vec<_> = (0..800).map(|_| random.floats(HIDDEN)).collect();
        let mut one = load(model, ComputeDtype::Int8, 1, isa);
        let alone: Vec<_> = input.chunks(1).map(|row| run(&mut one, row)).collect();
        for threads in 1..4 {
            let mut loaded = load(model, ComputeDtype::Int8, threads, isa);
            // Two threads cut rows from 32 or 64 on, with the matrix unit from 512, three from 96 or 768.
            for count in [3, 47, 96, 800] {
                for (of, out) in run(&mut loaded, &input[..count]).into_iter().enumerate() {
                    let same = out.iter().zip(&alone).all(|(row, alone)| *row == alone[of][0]);
                    assert!(same, "{isa}, {model}: {count} rows, {threads} threads, layer {of}");
                }
            }
        }
    }
}
