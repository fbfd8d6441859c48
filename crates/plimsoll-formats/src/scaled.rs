//! A second scale beside an NVFP4 weight: one factor for all scales of its groups, or one for those of each expert.

use crate::directory::{Entry, Scaled, Storage};
use crate::encoding::{Encoding, QuantLayout, ScaleKind};
use crate::row::RowBuf;

/// The largest number without a second scale: that of E4M3 times that of E2M1.
const LARGEST: f32 = 448.0 * 6.0;

/// Decodes row `row` of `rows`. `part` gives the bytes of the row's parts, by their numbers.
pub(crate) fn decode<'a>(
    scaled: &Scaled,
    (row, rows): (usize, usize),
    part: impl Fn(usize) -> &'a [u8],
    out: &mut RowBuf,
) {
    scaled.form.decode(part, out);
    let factor = scaled.factors[row / (rows / scaled.factors.len())];
    match scaled.divides {
        true => out.scale_groups(|scale| scale / factor),
        false => out.scale_groups(|scale| scale * factor),
    }
}

/// Gives a tensor its second scale: a factor for all of it, or one for each expert of `[experts, outputs, inputs]`. Factors of 1
/// leave the tensor as it is.
///
/// # Errors
/// What is wrong with the tensor or its factors.
pub(crate) fn apply(mut entry: Entry, factors: Vec<f32>, divides: bool) -> Result<Entry, String> {
    if factors.iter().all(|factor| *factor == 1.0) && !factors.is_empty() {
        return Ok(entry);
    }
    let layout = match entry.info.encoding {
        Encoding::Quant(layout) if layout.scales == ScaleKind::Ue4m3Half => layout,
        _ => return Err("it has a second scale, which only NVFP4 weights may have; convert the model again".to_owned()),
    };
    let Some(form) = entry.storage.row_form(entry.info.encoding) else {
        return Err("it has a second scale, and its rows have no decoder for one".to_owned());
    };
    let experts = if entry.info.shape.len() == 3 { entry.info.shape[0] } else { 1 };
    if factors.len() != 1 && factors.len() != experts {
        return Err(format!("it has {} second scales, and {experts} fit: one, or one an expert", factors.len()));
    }
    let usable = |factor: f32| match divides {
        true => (LARGEST / factor).is_finite(),
        false => (LARGEST * factor).is_finite(),
    };
    if let Some(factor) = factors.iter().find(|factor| !usable(**factor)) {
        return Err(format!("its second scale is {factor}; weights must be finite: convert the model again"));
    }
    entry.info.encoding = Encoding::Quant(QuantLayout { scales: ScaleKind::F32, ..layout });
    let storage = entry.storage;
    entry.storage = Storage::Scaled(Box::new(Scaled { storage, form, factors: factors.into(), divides }));
    Ok(entry)
}
