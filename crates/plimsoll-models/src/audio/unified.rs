//! The projection that Gemma 4 Unified has in place of an audio encoder: it turns the samples of a token into an embedding.
//!
//! Reference: transformers, `modeling_gemma4_unified.py`.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, VectorId};

use crate::encoder_parts::NO_HEAD;
use crate::{Encoder, EncoderInput};

/// Epsilon of the norm before the projection.
const EPS: f32 = 1e-6;

/// Weights of the projection and its norm.
pub struct AudioEncoder {
    samples: usize,
    /// Ones: the weights of the norm.
    plain: VectorId,
    projection: LinearId,
    /// Width of the model.
    out: usize,
}

impl AudioEncoder {
    /// Declares `audio.*` for `samples` samples a token, and for rows of width `out`, the model's.
    pub fn declare(samples: usize, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        Ok(Self {
            samples,
            plain: declare.values(vec![1.0; samples]),
            projection: declare.linear("audio.projector.embedding_projection.weight", out, samples)?,
            out,
        })
    }
}

impl Encoder for AudioEncoder {
    fn patch_width(&self) -> usize {
        self.samples
    }

    fn output_width(&self) -> usize {
        self.out
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(NO_HEAD, self.samples)
    }

    fn encode(&self, device: &mut dyn Device, clips: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let rows = clips.grids.iter().map(|grid| grid.patches()).sum();
        let output = device.temp(rows, self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, self.samples)?;
        device.place(x, 0, clips.patches, self.samples, 0, Mode::Store);
        device.rms_norm(x, x, self.plain, EPS);
        device.linear(x, &[(self.projection, output)], Mode::Store)?;
        device.release(scope);
        Ok(output)
    }
}
