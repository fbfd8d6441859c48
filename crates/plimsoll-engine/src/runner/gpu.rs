//! A model on a GPU. As the CPU's runner, with one submission a pass.

use std::sync::Arc;

use plimsoll_device::{Buf, DeviceError, ModelShape, StepInput};
use plimsoll_gpu::{Context, GpuDevice, GpuError, GpuMemory, GpuWeights, Sizes};
use plimsoll_memory::Ledger;
use plimsoll_memory::sizing::{self, Failure};
use plimsoll_models::{EncoderInput, EncoderKind, Model};

use crate::runner::Runner;
use crate::runner::backend::{Backend, Extent};
use crate::runner::cpu::Passes;

/// A model on a GPU.
pub struct GpuRunner {
    model: Arc<dyn Model>,
    /// None after a loss, if it could not be opened again.
    device: Option<GpuDevice>,
    passes: Passes,
    /// Outputs of the last [`Runner::encode`].
    encoded: Option<Buf>,
    again: Option<Again>,
    /// Outputs of a step that are fetched together.
    outputs: Vec<Buf>,
    /// For each wanted row, the index of its first candidate among all of the step, and how many it has.
    places: Vec<[usize; 2]>,
}

/// Opens the device and loads the weights.
pub(crate) type Load = Arc<dyn Fn() -> Result<(Context, GpuWeights), String> + Send + Sync>;

/// The resources to build a lost device again.
struct Again {
    load: Load,
    ledger: Arc<Ledger>,
    shape: ModelShape,
    sizes: Sizes,
}

impl Again {
    fn build(&self) -> Result<GpuDevice, String> {
        let (mut context, weights) = (self.load)()?;
        let memory = GpuMemory::new(&mut context, &self.ledger, &self.shape, self.sizes);
        Ok(GpuDevice::new(context, weights, memory.map_err(|error| error.to_string())?))
    }
}

/// The error of a step without a device.
const GONE: &str = "it was lost and could not be opened again; restart the server";

impl GpuRunner {
    /// Clears the device's workspace, but for a step that is between two layers.
    fn cleared(&mut self) -> Result<(), DeviceError> {
        let device = self.device.as_mut().ok_or_else(|| DeviceError::Gpu(GONE.into()))?;
        device.forget();
        if !self.passes.release_step_buffers(device) {
            device.begin_step();
        }
        Ok(())
    }

    /// Submits a recorded pass, and fetches its output. A failed pass is not submitted.
    fn finish<T>(&mut self, passed: Result<T, DeviceError>, step: &StepInput<'_>) -> Result<T, DeviceError> {
        let device = self.device.as_mut().ok_or_else(|| DeviceError::Gpu(GONE.into()))?;
        let passed = match passed {
            Ok(passed) => passed,
            Err(error) => {
                device.forget();
                return Err(error);
            }
        };
        self.outputs.clear();
        self.places.clear();
        if let Some(output) = self.passes.output() {
            match self.passes.candidates() {
                Some(found) => {
                    self.places.extend(places_of(step.candidates));
                    self.outputs.push(found);
                    self.outputs.extend(whole_rows(output.logits, step.candidates));
                }
                None => self.outputs.push(output.logits),
            }
            self.outputs.extend(step.pooled.then_some(output.hidden));
        }
        device.finish(&self.outputs).map(|()| passed)
    }

    /// The device and the passes over it, after [`Self::cleared`].
    fn parts(&mut self) -> Result<(&dyn Model, &mut GpuDevice, &mut Passes), DeviceError> {
        let device = self.device.as_mut().ok_or_else(|| DeviceError::Gpu(GONE.into()))?;
        Ok((&*self.model, device, &mut self.passes))
    }
}

/// The index of each row's first candidate, and how many it has.
fn places_of(candidates: &[u32]) -> impl Iterator<Item = [usize; 2]> {
    candidates.iter().scan(0, |first, count| {
        let place = [*first, *count as usize];
        *first += *count as usize;
        Some(place)
    })
}

/// The rows without requested candidates, neighbours together.
fn whole_rows(logits: Buf, candidates: &[u32]) -> impl Iterator<Item = Buf> {
    let runs = candidates.chunk_by(|count, next| (*count == 0) == (*next == 0));
    let placed = runs.scan(0, move |first, run| {
        let rows = logits.span(*first, run.len());
        *first += run.len();
        Some((run[0] == 0).then_some(rows))
    });
    placed.flatten()
}

impl Runner for GpuRunner {
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.cleared()?;
        let (model, device, passes) = self.parts()?;
        let passed = passes.forward(model, device, step);
        self.finish(passed, step)
    }

    fn begin(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        let (model, device, passes) = self.parts()?;
        device.begin_step();
        let passed = passes.begin(model, device, step);
        self.finish(passed, step)
    }

    fn advance(&mut self, step: &StepInput<'_>) -> Result<bool, DeviceError> {
        let (model, device, passes) = self.parts()?;
        let passed = passes.advance(model, device, step);
        self.finish(passed, step)
    }

    fn forget(&mut self) {
        self.passes = Passes::default();
    }

    fn draft(&mut self, from: &[u32], step: &StepInput<'_>) -> Result<(), DeviceError> {
        let (model, device, passes) = self.parts()?;
        // The pass before has run, and its hidden states are still in the arena.
        let passed = passes.draft(model, device, from, step);
        self.finish(passed, step)
    }

    fn lost(&self) -> Option<String> {
        self.device.as_ref().map_or_else(|| Some(GONE.into()), GpuDevice::failure)
    }

    fn reopen(&mut self) -> Result<(), String> {
        (self.passes, self.encoded) = (Passes::default(), None);
        // The lost device's memory is freed before it is allocated anew.
        self.device = None;
        let again = self.again.take().ok_or("it was opened again once already")?;
        again.ledger.unseal();
        let built = again.build();
        again.ledger.seal();
        self.device = Some(built?);
        Ok(())
    }

    fn encode(&mut self, kind: EncoderKind, items: &EncoderInput<'_>) -> Result<(), DeviceError> {
        self.encoded = None;
        self.cleared()?;
        let (model, device, _) = self.parts()?;
        let encoder = model.encoder(kind).ok_or(DeviceError::NoEncoder)?;
        match encoder.encode(device, items) {
            Ok(output) => {
                device.finish(&[output])?;
                self.encoded = Some(output);
                Ok(())
            }
            Err(error) => {
                device.forget();
                Err(error)
            }
        }
    }

    fn embedding(&mut self, row: usize) -> &[f32] {
        let encoded = self.encoded.expect("images were encoded");
        self.device.as_mut().expect("the encoder's device").row_mut(encoded, row)
    }

    fn hidden(&mut self, row: usize) -> &[f32] {
        let output = self.passes.output().expect("a step was run");
        self.device.as_mut().expect("the step's device").row_mut(output.hidden, row)
    }

    fn candidates(&mut self, row: usize) -> Option<&[[f32; 2]]> {
        let (found, [first, count]) = (self.passes.candidates()?, *self.places.get(row)?);
        let device = self.device.as_mut().filter(|_| count > 0)?;
        Some(device.elements(found.span(first, count)).as_chunks().0)
    }

    fn take_fetched(&mut self) -> u64 {
        self.device.as_mut().map_or(0, GpuDevice::take_fetched)
    }

    fn logits(&mut self, row: usize) -> &mut [f32] {
        let output = self.passes.output().expect("a step was run");
        self.device.as_mut().expect("the step's device").row_mut(output.logits, row)
    }
}

/// An open GPU with loaded weights.
pub(crate) struct GpuBackend {
    model: Arc<dyn Model>,
    /// Sizes that do not depend on the pools.
    step: Sizes,
    /// Device context and weights; none while a runner holds them.
    parts: Option<(Context, GpuWeights)>,
    load: Load,
}

impl GpuBackend {
    /// Takes loaded weights on an open device; `load` opens and loads again. The pools of `step` do not count.
    pub fn new(model: Arc<dyn Model>, step: Sizes, loaded: (Context, GpuWeights), load: Load) -> Self {
        Self { model, step, parts: Some(loaded), load }
    }
}

fn refused(error: GpuError) -> Failure {
    match error {
        // The driver does not say how much was missing; one byte leaves the next attempt open.
        GpuError::Refused { component, bytes, .. } => {
            sizing::OutOfMemory { component: component.into(), requested: bytes, shortfall: 1 }.into()
        }
        error => Failure::Other(crate::api::start_error::StartError::from(error).into()),
    }
}

impl Backend for GpuBackend {
    type Runner = GpuRunner;

    fn build(&mut self, ledger: &Arc<Ledger>, shape: &ModelShape, extent: Extent) -> Result<GpuRunner, Failure> {
        let Some((mut context, weights)) = self.parts.take() else {
            return Err(Failure::Other("internal error: a pool was built while another exists".into()));
        };
        let windows = if shape.kv.window().is_some() { extent.pools.slots } else { 0 };
        let slots = if shape.state.is_some() { extent.pools.slots } else { 0 };
        let sizes = Sizes { pages: [extent.pools.pages, windows], slots, ..self.step };
        let outputs = sizes.outputs;
        match GpuMemory::new(&mut context, ledger, shape, sizes) {
            Ok(memory) => {
                let device = Some(GpuDevice::new(context, weights, memory));
                let (load, ledger) = (Arc::clone(&self.load), Arc::clone(ledger));
                let again = Some(Again { load, ledger, shape: shape.clone(), sizes });
                let (model, passes) = (Arc::clone(&self.model), Passes::default());
                let (outputs, places) = (Vec::with_capacity(outputs), Vec::with_capacity(outputs));
                Ok(GpuRunner { model, device, passes, encoded: None, again, outputs, places })
            }
            Err(error) => {
                self.parts = Some((context, weights));
                Err(refused(error))
            }
        }
    }

    fn room(&self, ledger: &Ledger) -> u64 {
        // While a runner has the device, nothing is built.
        let free = self.parts.as_ref().and_then(|(context, _)| context.free_memory());
        free.map_or(u64::MAX, |free| free.saturating_add(ledger.committed_on_device()))
    }

    fn workspace_peak(runner: &mut GpuRunner) -> usize {
        runner.device.as_ref().map_or(0, GpuDevice::workspace_peak)
    }

    fn take_apart(&mut self, runner: GpuRunner) {
        self.parts = runner.device.map(GpuDevice::into_parts);
    }
}
