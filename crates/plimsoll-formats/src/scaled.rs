//! A second scale beside an NVFP4 weight: one factor for all groups' scales, or one factor per expert.

use crate::decode::float;
use crate::directory::{Entry, Scaled, Storage, float_bytes};
use crate::encoding::{Encoding, QuantLayout, ScaleKind};
use crate::row::RowBuf;
use crate::row_form::RowForm;

/// The largest number without a second scale: the largest E4M3 number times the largest E2M1 number.
const LARGEST: f32 = 448.0 * 6.0;

/// Decodes row `row` of `rows`. Returns false if one of its scales is NaN. `part` returns the bytes of one of the row's parts, by its
/// number.
pub(crate) fn decode<'a>(
    scaled: &Scaled,
    (row, rows): (usize, usize),
    part: impl Fn(usize) -> &'a [u8],
    out: &mut RowBuf,
) -> bool {
    // In blocks of GGUF, NaN counts as 0.
    if matches!(scaled.form, RowForm::Micro(_)) && part(1).iter().any(|scale| scale & 0x7F == 0x7F) {
        return false;
    }
    scaled.form.decode(part, out);
    let factor = scaled.factors[row / (rows / scaled.factors.len())];
    match scaled.divides {
        true => out.scale_groups(|scale| scale / factor),
        false => out.scale_groups(|scale| scale * factor),
    }
    true
}

/// Second scales as they are stored in a file.
pub(crate) struct Factors<'a> {
    /// The float type of the factors.
    pub(crate) encoding: Encoding,
    /// The factors: one for the tensor, or one for each expert of `[experts, outputs, inputs]`.
    pub(crate) bytes: &'a [u8],
    /// As in [`Scaled`].
    pub(crate) divides: bool,
}

/// Gives a tensor its second scale. Factors of 1 change nothing.
///
/// # Errors
/// A text that names the fault of the tensor or its factors.
pub(crate) fn apply(mut entry: Entry, second: &Factors) -> Result<Entry, String> {
    let Some(width) = float_bytes(&[1], second.encoding) else {
        return Err("its second scale is quantized; convert the model again".to_owned());
    };
    let (count, experts) =
        (second.bytes.len() / width, if entry.info.shape.len() == 3 { entry.info.shape[0] } else { 1 });
    if count != 1 && count != experts {
        return Err(format!("it has {count} second scales, and {experts} fit: one, or one an expert"));
    }
    let mut factors = Vec::with_capacity(count);
    float::widen(second.encoding, second.bytes, &mut factors);
    if factors.iter().all(|factor| *factor == 1.0) {
        return Ok(entry);
    }
    let layout = match entry.info.encoding {
        Encoding::Quant(layout) if layout.scales == ScaleKind::Ue4m3Half => layout,
        _ => return Err("it has a second scale, which only NVFP4 weights may have; convert the model again".to_owned()),
    };
    let Some(form) = entry.storage.row_form(entry.info.encoding) else {
        return Err("it has a second scale, and its rows have no decoder for one".to_owned());
    };
    let usable = |factor: f32| match second.divides {
        true => (LARGEST / factor).is_finite(),
        false => (LARGEST * factor).is_finite(),
    };
    if let Some(factor) = factors.iter().find(|factor| !usable(**factor)) {
        return Err(format!("its second scale is {factor}; weights must be finite: convert the model again"));
    }
    entry.info.encoding = Encoding::Quant(QuantLayout { scales: ScaleKind::F32, ..layout });
    entry.info.bytes += second.bytes.len() as u64;
    let (storage, divides) = (entry.storage, second.divides);
    entry.storage = Storage::Scaled(Box::new(Scaled { storage, form, factors: factors.into(), divides }));
    Ok(entry)
}
