//! A linear layer of Gemma 4's encoders, which clamps its inputs and outputs to bounds.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, RowPiece};

/// The least and the greatest number.
type Bounds = [f32; 2];

/// A linear layer that clamps its input and its output to bounds.
pub(crate) struct Clipped {
    matrix: LinearId,
    /// Bounds of the input and of the output; none in sizes without bounds.
    bounds: Option<[Bounds; 2]>,
}

impl Clipped {
    /// Declares `{prefix}.linear.weight` from these rows, or from all rows in their order if the list is empty, and its bounds.
    pub fn declare(
        prefix: &str,
        (out, k): (usize, usize),
        rows: &[RowPiece],
        clipped: bool,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let name = format!("{prefix}.linear.weight");
        let matrix = match rows {
            [] => declare.linear(&name, out, k)?,
            pieces => declare.linear_rows(&name, &[out, k], pieces, k)?,
        };
        let bounds = match clipped {
            true => Some([bounds(prefix, "input", declare)?, bounds(prefix, "output", declare)?]),
            false => None,
        };
        Ok(Self { matrix, bounds })
    }

    /// `out = linear(x)`. `scratch` has the shape of `x` and may be `x`. With bounds it is overwritten.
    pub fn apply(&self, device: &mut dyn Device, x: Buf, scratch: Buf, out: Buf) -> Result<(), DeviceError> {
        let Some([input, output]) = self.bounds else { return device.linear(x, &[(self.matrix, out)], Mode::Store) };
        if scratch != x {
            device.take(scratch, x, 0);
        }
        device.clamp(scratch, input[0], input[1]);
        device.linear(scratch, &[(self.matrix, out)], Mode::Store)?;
        device.clamp(out, output[0], output[1]);
        Ok(())
    }
}

/// Reads `{prefix}.{side}_min` and `{prefix}.{side}_max`. Without weights the bounds are infinite.
fn bounds(prefix: &str, side: &str, declare: &Declare<'_>) -> Result<Bounds, DeclareError> {
    let one = |end: &str, plan: f32| declare.read_values(&format!("{prefix}.{side}_{end}"), 1, plan);
    let (low, high) = (one("min", f32::NEG_INFINITY)?[0], one("max", f32::INFINITY)?[0]);
    match low <= high {
        true => Ok([low, high]),
        false => Err(DeclareError::Unsupported(format!("'{prefix}': {side}_min {low} is above {side}_max {high}"))),
    }
}
