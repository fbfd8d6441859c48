//! Linear layers with matrices that have their columns in another order than the input (act-order of GPTQ). The input is permuted first.

use super::{Buf, Device, DeviceError, Input, Mode};
use crate::weights::{LinearId, VectorId};

/// The operations of a device for matrices with permuted columns.
pub(crate) trait Ordered: Device {
    /// Returns for each column of a matrix the index of its input; none where the columns are in the order of the input.
    fn order(&self, id: LinearId) -> Option<VectorId>;

    /// `out[r][j] = x[r][order[j]]`.
    fn permute(&mut self, out: Buf, x: Buf, order: VectorId);

    /// [`Device::linear_rows`] of layers with columns in the order of `input`.
    fn in_order(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError>;
}

/// Carries out [`Device::linear_rows`] for any layers. Neighbours with the same order share one permuted input.
pub(crate) fn linear_rows<D: Ordered>(
    device: &mut D,
    input: Input,
    layers: &[(LinearId, Buf)],
    mode: Mode,
    bf16_rows: usize,
) -> Result<(), DeviceError> {
    if layers.iter().all(|(id, _)| device.order(*id).is_none()) {
        return device.in_order(input, layers, mode, bf16_rows);
    }
    let x = input.ready(device);
    let scope = device.mark();
    let ordered = device.temp(x.rows, x.cols)?;
    let mut rest = layers;
    while let Some((first, _)) = rest.first() {
        let order = device.order(*first);
        let count = rest.iter().take_while(|(id, _)| device.order(*id) == order).count();
        let input = match order {
            Some(order) => {
                device.permute(ordered, x, order);
                ordered
            }
            None => x,
        };
        device.in_order(input.into(), &rest[..count], mode, bf16_rows)?;
        rest = &rest[count..];
    }
    device.release(scope);
    Ok(())
}
