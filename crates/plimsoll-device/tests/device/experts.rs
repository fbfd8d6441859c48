//! Mixture of experts on the CPU device. A row's bits are those of its experts' matrices applied to it alone. They do
//! not depend on the other rows, nor on how many choose the same expert. The workspace is the planned one.

use crate::common::random::Random;
use crate::common::{checkpoint, device, matrix, rows, shape};
use plimsoll_device::{
    Activation, ComputeDtype, CpuDevice, Declare, Device, DtypePolicy, Experts, Isa, LinearId, Mode, PlanDevice,
    WeightTable,
};

/// Experts' matrices, and their shape.
struct Bank {
    model: &'static str,
    table: WeightTable,
    gate: Vec<LinearId>,
    up: Vec<LinearId>,
    down: Vec<LinearId>,
    hidden: usize,
    width: usize,
}

impl Bank {
    /// Experts from the tensors `(gate, up, down)` of a fixture.
    fn new(model: &'static str, policy: DtypePolicy, names: &[[String; 3]]) -> Bank {
        let checkpoint = checkpoint(model);
        let info = checkpoint.tensor(&names[0][0]).unwrap_or_else(|| panic!("{model}: {}", names[0][0]));
        let (width, hidden) = (info.shape[0], info.shape[1]);
        let mut declare = Declare::new(&checkpoint, policy);
        let mut ids = |part: usize, out, k| -> Vec<LinearId> {
            names.iter().map(|names| declare.linear(&names[part], out, k).unwrap()).collect()
        };
        let (gate, up, down) = (ids(0, width, hidden), ids(1, width, hidden), ids(2, hidden, width));
        // With the second form of activations too, which any machine can write.
        Bank { model, table: declare.finish().on(Isa::Amx), gate, up, down, hidden, width }
    }

    /// The two layers of a dense model, mixed into eight experts.
    fn of_layers(model: &'static str) -> Bank {
        let name = |layer: usize, part: &str| format!("model.layers.{layer}.mlp.{part}_proj.weight");
        let parts = [(0, "gate"), (0, "up"), (1, "gate"), (1, "up")];
        let experts = (0..8).map(|e: usize| {
            let ((a, gate), (b, up)) = (parts[e % 4], parts[(e + 1 + e / 4) % 4]);
            [name(a, gate), name(b, up), name((e + e / 4) % 2, "down")]
        });
        Bank::new(model, DtypePolicy::Auto, &experts.collect::<Vec<_>>())
    }

    fn of_moe(policy: DtypePolicy) -> Bank {
        let name = |e: usize, part: &str| format!("model.layers.0.mlp.experts.{e}.{part}_proj.weight");
        let experts = (0..8).map(|e| ["gate", "up", "down"].map(|part| name(e, part)));
        Bank::new("qwen3-moe", policy, &experts.collect::<Vec<_>>())
    }

    fn spec(&self, top_k: usize, renormalise: bool) -> Experts<'_> {
        Experts {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            top_k,
            renormalise,
            act: Activation::Silu,
            scoring: None,
            weighs_inputs: false,
        }
    }

    fn device(&self, threads: usize, isa: Isa) -> CpuDevice {
        device(&self.table, &checkpoint(self.model), &shape(None), 0, threads, isa)
    }
}

/// Returns the result of a row alone, computed with plain linear layers.
fn alone(device: &mut CpuDevice, bank: &Bank, spec: &Experts<'_>, x: &[f32], router: &[f32], old: &[f32]) -> Vec<u32> {
    device.begin_step();
    let (mut logits, top) = (router.to_vec(), spec.top_k);
    let (mut ids, mut weights) = (vec![0; top], vec![0.0; top]);
    plimsoll_kernels::route(Isa::detect(), &mut logits, &mut ids, &mut weights, spec.renormalise);
    let x = matrix(device, &[x.to_vec()]);
    let mut results = Vec::new();
    for (place, id) in ids.iter().enumerate() {
        let id = *id as usize;
        let (gate, up) = (device.temp(1, bank.width).unwrap(), device.temp(1, bank.width).unwrap());
        device.linear(x, &[(bank.gate[id], gate), (bank.up[id], up)], Mode::Store).unwrap();
        if spec.weighs_inputs {
            [gate, up].into_iter().for_each(|made| device.scale_rows(made, &|_| weights[place]));
        }
        device.glu(gate, up, spec.act);
        let y = device.temp(1, bank.hidden).unwrap();
        device.linear(gate, &[(bank.down[id], y)], Mode::Store).unwrap();
        results.extend_from_slice(device.row_mut(y, 0));
    }
    if spec.weighs_inputs {
        weights.fill(1.0);
    }
    let (mut out, places) = (old.to_vec(), (0..top as u32).collect::<Vec<_>>());
    plimsoll_kernels::combine(Isa::detect(), &mut out, &results, &places, &weights, plimsoll_kernels::Mode::Add);
    out.iter().map(|x| x.to_bits()).collect()
}

fn check(bank: &Bank) {
    let mut random = Random::new(5);
    let experts = bank.gate.len();
    for (count, top_k, skew) in [(1, 2, false), (7, 3, false), (40, 2, true), (150, 8, false), (33, 1, true)] {
        // Of one expert the weight would be 1.
        let spec = Experts { weighs_inputs: count % 3 == 0 || top_k == 3, ..bank.spec(top_k, top_k > 3) };
        let inputs: Vec<Vec<f32>> = (0..count).map(|_| random.floats(bank.hidden)).collect();
        // Skewed: every row to the same experts, the worst case.
        let same = random.floats(experts);
        let routers: Vec<Vec<f32>> =
            (0..count).map(|_| if skew { same.clone() } else { random.floats(experts) }).collect();
        let olds: Vec<Vec<f32>> = (0..count).map(|_| random.floats(bank.hidden)).collect();
        let mut single = bank.device(1, Isa::detect());
        let expected: Vec<Vec<u32>> =
            (0..count).map(|row| alone(&mut single, bank, &spec, &inputs[row], &routers[row], &olds[row])).collect();
        for (threads, isa) in [(1, Isa::detect()), (2, Isa::detect()), (3, Isa::Portable), (4, Isa::detect())] {
            let mut device = bank.device(threads, isa);
            device.begin_step();
            let (x, router) = (matrix(&mut device, &inputs), matrix(&mut device, &routers));
            let out = matrix(&mut device, &olds);
            device.experts(&spec, out, x, router, Mode::Add).unwrap();
            let name = format!("{} {count} rows, {top_k} of {experts}, {threads} threads, {isa}", bank.model);
            assert!(rows(&mut device, out) == expected, "{name}");

            let mut plan = PlanDevice::new(&bank.table, &shape(None).kv);
            let bufs = [(count, bank.hidden), (count, experts), (count, bank.hidden)];
            let [x, router, out] = bufs.map(|(rows, cols)| plan.temp(rows, cols).unwrap());
            plan.experts(&spec, out, x, router, Mode::Add).unwrap();
            let scratch = plimsoll_device::cpu::scratch_bytes(&shape(None), threads);
            assert_eq!(device.memory().workspace_peak(), plan.high_water() + scratch, "{name}: planned workspace");
        }
    }
}

#[test]
fn float_experts() {
    check(&Bank::of_moe(DtypePolicy::Auto));
    check(&Bank::of_moe(DtypePolicy::F32));
}

#[test]
fn quantized_experts() {
    check(&Bank::of_layers("gguf-llama-q4_0"));
    check(&Bank::of_layers("mlx-llama-6bit-g64"));
}

#[test]
fn experts_over_rows_of_eight_bits() {
    let bank = Bank::of_layers("mlx-llama-6bit-g64");
    check(&Bank { table: bank.table.computed_in(ComputeDtype::Int8).full_precision_rows(), ..bank });
}

#[test]
fn experts_of_several_formats_in_one_layer() {
    let bank = Bank::of_layers("gguf-qwen3-mixed");
    let quantized = |id: &LinearId| bank.table.linear(*id).packing.takes_acts();
    println!(
        "quantized: {:?}",
        [&bank.gate, &bank.up, &bank.down].map(|ids| ids.iter().filter(|i| quantized(i)).count())
    );
    check(&bank);
}

#[test]
fn the_plan_counts_each_chosen_experts_weights_once() {
    let bank = Bank::of_moe(DtypePolicy::Auto);
    let mut plan = PlanDevice::new(&bank.table, &shape(None).kv);
    let [x, router, out] = [(3, bank.hidden), (3, 8), (3, bank.hidden)].map(|(r, c)| plan.temp(r, c).unwrap());
    plan.experts(&bank.spec(2, true), out, x, router, Mode::Store).unwrap();
    let expert: u64 =
        [bank.gate[0], bank.up[0], bank.down[0]].iter().map(|id| bank.table.linear(*id).packing.bytes() as u64).sum();
    assert_eq!(plan.work().weight_bytes, 6 * expert, "three rows with two experts each choose six at most");
    let products = 2 * 3 * 2 * (3 * bank.hidden * bank.width) as u64;
    assert_eq!(plan.work().flops, products + 8 * 3 * 8);
}
