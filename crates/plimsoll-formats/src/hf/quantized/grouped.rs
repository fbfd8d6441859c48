//! Integer codes with scales and zero points per group: joins the parts of one weight and checks their shapes against each other.
//!
//! Shapes, with bits b, inputs k, outputs n, groups g (words have 32 bits):
//!
//! | | codes | zero points | scales |
//! | --- | --- | --- | --- |
//! | AWQ | `qweight` [k, n·b/32] | `qzeros` [g, n·b/32] | `scales` [g, n] |
//! | GPTQ | `qweight` [k·b/32, n] | `qzeros` [g, n·b/32] | `scales` [g, n] |
//! | compressed-tensors, packed | `weight_packed` [n, k·b/32] | `weight_zero_point` [n·b/32, g] | `weight_scale` [n, g] |
//! | compressed-tensors, bytes | `weight` [n, k] | `weight_zero_point` [n, g] | `weight_scale` [n, g] |

use std::sync::Arc;

use super::rules::canonical_module;
use super::tensors::Tensors;
use crate::decode::grouped::{Cells, Order, Scales};
use crate::directory::{Entry, Grouped, Storage};
use crate::encoding::{Dtype, Encoding, QuantLayout, ScaleKind, TensorInfo};
use crate::error::{FormatError, quote};
use crate::hf::names::canonical;
use crate::hf::safetensors::{Found, Kind};
use crate::quantization::{IntegerQuant, Quantization, Scheme};

/// One weight's tensors and its declared quantization.
struct Module<'a> {
    codes: &'a Found,
    name: &'a str,
    declared: IntegerQuant,
    all: &'a Tensors<'a>,
}

/// A tensor of small integers and the layout of its values.
type Part<'a> = (&'a Found, Cells);

impl<'a> Module<'a> {
    fn new(codes: &'a Found, end: &str, declared: &Quantization, all: &'a Tensors<'a>) -> Result<Self, FormatError> {
        let name = codes.name.strip_suffix(end).unwrap_or(&codes.name);
        // The tensors decide which modules are quantized; the configuration decides the scheme.
        let scheme = declared.of(&canonical_module(name)).unwrap_or(declared.default);
        match scheme {
            Scheme::Integer(declared) => Ok(Module { codes, name, declared, all }),
            Scheme::Group(_) | Scheme::F8(_) => Err(FormatError::Unsupported(format!(
                "tensor {}: its scheme in quantization_config is not one of integers",
                quote(&codes.name)
            ))),
        }
    }

    fn wrong(&self, what: &str) -> FormatError {
        FormatError::Safetensors(format!("tensor {}: {what}", quote(&self.codes.name)))
    }

    fn beside(&self, leaf: &str) -> Option<&'a Found> {
        self.all.find(&format!("{}.{leaf}", self.name))
    }

    fn need(&self, leaf: &str) -> Result<&'a Found, FormatError> {
        self.beside(leaf).ok_or_else(|| self.wrong(&format!("its {leaf} is missing")))
    }

    /// The number of elements that share a scale, with `groups` groups in a row of `cols`.
    fn group(&self, cols: usize, groups: usize) -> Result<usize, FormatError> {
        let declared = self.declared.group.unwrap_or(cols);
        let group = match () {
            () if groups > 0 && cols.div_ceil(declared.max(1)) == groups => declared,
            () if groups > 0 && cols.is_multiple_of(groups) => cols / groups,
            () => return Err(self.wrong(&format!("{groups} groups in rows of {cols}"))),
        };
        let fits = group == 16 || group.is_multiple_of(32) || groups == 1;
        match fits {
            true => Ok(group.min(cols)),
            false => Err(FormatError::Unsupported(format!(
                "tensor {}: groups of {group} elements; supported are 16, multiples of 32, and whole rows",
                quote(&self.codes.name)
            ))),
        }
    }

    /// The columns in the order of their groups. None if a group's columns are neighbours; with act-order of GPTQ they are not.
    fn order(&self, leaf: &str, cols: usize, group: usize) -> Result<Option<Arc<[u32]>>, FormatError> {
        let Some(order) = self.beside(leaf) else { return Ok(None) };
        if order.dtype != Kind::I32 || order.shape != [cols] {
            return Err(self.wrong(&format!("its {leaf} is not a list of {cols} 32-bit integers")));
        }
        let words = self.all.bytes(order).chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let groups: Vec<i32> = words.collect();
        let is = |index: i32, at: usize| usize::try_from(index) == Ok(at / group);
        // compressed-tensors writes -1 everywhere if the columns are not reordered.
        if groups.iter().enumerate().all(|(at, index)| *index == -1 || is(*index, at)) {
            return Ok(None);
        }
        let mut columns: Vec<u32> = (0..cols as u32).collect();
        columns.sort_by_key(|column| groups[*column as usize]);
        match columns.iter().enumerate().all(|(at, column)| is(groups[*column as usize], at)) {
            true => Ok(Some(columns.into())),
            false => Err(self.wrong(&format!("its {leaf} does not divide {cols} columns into groups of {group}"))),
        }
    }

    fn scales(&self, scales: &Found, row: usize, group: usize) -> Result<Scales, FormatError> {
        match scales.dtype {
            Kind::Float(encoding) => Ok(Scales { encoding, row, group }),
            _ => Err(self.wrong("its scales are not floats")),
        }
    }

    /// Returns the entry of a weight of this shape.
    fn entry(
        &self,
        shape: Vec<usize>,
        group: usize,
        codes: Cells,
        (scale_tensor, scales): (&Found, Scales),
        zeros: Option<Part<'_>>,
        order: Option<Arc<[u32]>>,
    ) -> Result<Entry, FormatError> {
        let (cols, bits) = (shape[shape.len() - 1], codes.bits);
        let rows: usize = shape[..shape.len() - 1].iter().product();
        let one = match &zeros {
            None => Some(1 << (bits - 1)),
            Some((tensor, cells)) => self.one_zero(tensor, cells, rows, cols.div_ceil(group)),
        };
        let stored = match scales.encoding {
            Encoding::F16 => Dtype::F16,
            Encoding::BF16 => Dtype::Bf16,
            _ => Dtype::F32,
        };
        let layout = match one {
            Some(zero) => {
                QuantLayout { code_bits: bits, group, zero, scales: stored.scales(), offset: false, codebook: None }
            }
            None => {
                QuantLayout { code_bits: bits, group, zero: 0, scales: ScaleKind::F32, offset: true, codebook: None }
            }
        };
        let zeros = zeros.filter(|_| one.is_none());
        let parts = [Some(self.codes), Some(scale_tensor), zeros.as_ref().map(|(tensor, _)| *tensor)];
        let bytes = parts.iter().flatten().map(|part| part.span.range.len() as u64).sum();
        Ok(Entry {
            name: canonical(&format!("{}.weight", self.name)),
            info: TensorInfo { shape, encoding: Encoding::Quant(layout), bytes },
            storage: Storage::Grouped(Box::new(Grouped {
                codes: (self.codes.span.clone(), codes),
                scales: (scale_tensor.span.clone(), scales),
                zeros: zeros.map(|(tensor, cells)| (tensor.span.clone(), cells)),
                order,
            })),
        })
    }

    /// Returns the zero point if all groups have the same one: symmetric checkpoints store it repeatedly.
    fn one_zero(&self, zeros: &Found, cells: &Cells, rows: usize, groups: usize) -> Option<u8> {
        let bytes = self.all.bytes(zeros);
        let mut values = Vec::with_capacity(groups);
        let mut one = None;
        for row in 0..rows {
            values.clear();
            cells.read(bytes, row, groups, &mut values);
            let first = *one.get_or_insert(*values.first()?);
            if values.iter().any(|value| *value != first) {
                return None;
            }
        }
        one
    }
}

/// Joins a weight of AWQ.
pub(super) fn awq<'a>(codes: &'a Found, declared: &Quantization, all: &'a Tensors<'a>) -> Result<Entry, FormatError> {
    let module = Module::new(codes, ".qweight", declared, all)?;
    let ([cols, words], scales, zeros) = module.words_and_scales()?;
    let (groups, rows) = (scales.shape[0], scales.shape[1]);
    if words.checked_mul(8) != Some(rows) {
        return Err(module.wrong(&format!("{words} words a row for {rows} outputs of 4 bits")));
    }
    let cells = |column| Cells { bits: 4, order: Order::Rows { row: 1, column, interleaved: true }, flip: 0, plus: 0 };
    let group = module.group(cols, groups)?;
    let zeros = zeros.map(|zeros| module.checked(zeros, [groups, words]).map(|zeros| (zeros, cells(words))));
    module.entry(vec![rows, cols], group, cells(words), module.by_columns(scales)?, zeros.transpose()?, None)
}

/// Joins a weight of GPTQ.
pub(super) fn gptq<'a>(
    codes: &'a Found,
    declared: &Quantization,
    all: &'a Tensors<'a>,
    zeros_less_one: bool,
) -> Result<Entry, FormatError> {
    let module = Module::new(codes, ".qweight", declared, all)?;
    let ([words, rows], scales, zeros) = module.words_and_scales()?;
    let groups = scales.shape[0];
    if scales.shape[1] != rows {
        return Err(module.wrong(&format!("{rows} outputs, and scales for {}", scales.shape[1])));
    }
    // A rule may give a module another width than the default. The zero points show the width.
    let bits = match zeros {
        Some(zeros) if zeros.shape.len() == 2 => zeros.shape[1].saturating_mul(32) / rows.max(1),
        _ => usize::from(module.declared.bits),
    };
    let bits = u8::try_from(bits).ok().filter(|bits| matches!(bits, 2 | 4 | 8));
    let bits = bits.ok_or_else(|| module.wrong("its zero points are not those of 2, 4 or 8 bits"))?;
    let per = 32 / usize::from(bits);
    let cols = words.checked_mul(per).ok_or_else(|| module.wrong("its size overflows"))?;
    let group = module.group(cols, groups)?;
    let by_activation = module.order("g_idx", cols, group)?;
    let cells = Cells { bits, order: Order::Columns(rows), flip: 0, plus: 0 };
    let width = rows.div_ceil(per);
    let order = Order::Rows { row: 1, column: width, interleaved: false };
    let zero_cells = Cells { bits, order, flip: 0, plus: u8::from(zeros_less_one) };
    let zeros = zeros.map(|zeros| module.checked(zeros, [groups, width]).map(|zeros| (zeros, zero_cells)));
    module.entry(vec![rows, cols], group, cells, module.by_columns(scales)?, zeros.transpose()?, by_activation)
}

impl<'a> Module<'a> {
    /// Returns the shape of the codes, the scales and, if present, the zero points of AWQ and GPTQ.
    fn words_and_scales(&self) -> Result<([usize; 2], &'a Found, Option<&'a Found>), FormatError> {
        let scales = self.need("scales")?;
        let zeros = match self.declared.symmetric {
            true => self.beside("qzeros"),
            false => Some(self.need("qzeros")?),
        };
        match (<[usize; 2]>::try_from(self.codes.shape.clone()), scales.shape.len()) {
            (Ok(shape), 2) => Ok((shape, scales, zeros)),
            _ => Err(self.wrong("it and its scales are not matrices")),
        }
    }

    /// Checks that zero points are 32-bit words of this shape.
    fn checked(&self, zeros: &'a Found, shape: [usize; 2]) -> Result<&'a Found, FormatError> {
        match zeros.dtype == Kind::I32 && zeros.shape == shape {
            true => Ok(zeros),
            false => Err(self.wrong(&format!("its zero points have shape {:?}, not {shape:?} of I32", zeros.shape))),
        }
    }

    /// Returns the layout of scales of shape [groups, outputs].
    fn by_columns<'b>(&self, scales: &'b Found) -> Result<(&'b Found, Scales), FormatError> {
        Ok((scales, self.scales(scales, 1, scales.shape[1])?))
    }

    /// Returns the scales of compressed-tensors for `rows` rows, and the groups of a row. There is one scale in all, one per row, or one
    /// per group.
    fn by_rows(&self, rows: usize) -> Result<(&'a Found, Scales, usize), FormatError> {
        let scales = self.need("weight_scale")?;
        let count: usize = scales.shape.iter().product();
        let groups = match count {
            1 => return Ok((scales, self.scales(scales, 0, 0)?, 1)),
            _ if rows > 0 && count.is_multiple_of(rows) => count / rows,
            _ => return Err(self.wrong(&format!("{count} scales for {rows} outputs"))),
        };
        Ok((scales, self.scales(scales, groups, 1)?, groups))
    }

    /// Returns the zero points of compressed-tensors: packed along outputs, or one byte each.
    fn zero_points(&self, bits: u8, rows: usize, groups: usize) -> Result<Option<Part<'a>>, FormatError> {
        let Some(zeros) = self.beside("weight_zero_point").filter(|_| !self.declared.symmetric) else {
            return Ok(None);
        };
        let count: usize = zeros.shape.iter().product();
        let cells = match zeros.dtype {
            // Stored values are signed, around 0. Codes are unsigned, around 2^(bits - 1).
            Kind::I8 if count == rows * groups => {
                Cells { bits: 8, order: Order::Stream(groups), flip: 0, plus: 1 << (bits - 1) }
            }
            Kind::I32 if matches!(bits, 2 | 4 | 8) && count == rows.div_ceil(32 / usize::from(bits)) * groups => {
                Cells { bits, order: Order::Rows { row: groups, column: 1, interleaved: false }, flip: 0, plus: 0 }
            }
            _ => {
                return Err(FormatError::Unsupported(format!(
                    "tensor {}: zero points of shape {:?} for {rows} outputs, {groups} groups and {bits} bits; \
                     use a symmetric version of the model",
                    quote(&zeros.name),
                    zeros.shape
                )));
            }
        };
        Ok(Some((zeros, cells)))
    }
}

/// Joins a packed weight of compressed-tensors.
pub(super) fn packed<'a>(
    codes: &'a Found,
    declared: &Quantization,
    all: &'a Tensors<'a>,
) -> Result<Entry, FormatError> {
    let module = Module::new(codes, ".weight_packed", declared, all)?;
    let Some((words, outer)) = codes.shape.split_last() else { return Err(module.wrong("it has no dimensions")) };
    let rows: usize = outer.iter().product();
    let (scale_tensor, scales, groups) = module.by_rows(rows)?;
    let cols = match module.beside("weight_shape") {
        Some(shape) if shape.dtype == Kind::I64 => {
            let last = module.all.bytes(shape).last_chunk::<8>().map(|bytes| i64::from_le_bytes(*bytes));
            last.and_then(|last| usize::try_from(last).ok())
        }
        Some(_) => None,
        None => words.checked_mul(32).map(|bits| bits / usize::from(module.declared.bits)),
    };
    let cols = cols.filter(|cols| *cols > 0).ok_or_else(|| module.wrong("its weight_shape is not two sizes"))?;
    // A module's target in the configuration may be wrong, but the shapes contain the width too.
    let widths = [module.declared.bits, 4, 8, 2, 3, 5, 6];
    let fits = |bits: &u8| cols.checked_mul(usize::from(*bits)).is_some_and(|all| all.div_ceil(32) == *words);
    let bits = widths.into_iter().find(fits);
    let bits = bits.ok_or_else(|| module.wrong(&format!("{words} words a row of {cols}, which is no known width")))?;
    let group = module.group(cols, groups)?;
    let order = module.order("weight_g_idx", cols, group)?;
    let cells = Cells { bits, order: Order::Stream(words * 4), flip: 0, plus: 0 };
    let zeros = module.zero_points(bits, rows, groups)?;
    module.entry([outer, &[cols]].concat(), group, cells, (scale_tensor, scales), zeros, order)
}

/// Joins a weight of compressed-tensors with codes of signed bytes.
pub(super) fn bytes<'a>(codes: &'a Found, declared: &Quantization, all: &'a Tensors<'a>) -> Result<Entry, FormatError> {
    let module = Module::new(codes, ".weight", declared, all)?;
    let Some((&cols, outer)) = codes.shape.split_last() else { return Err(module.wrong("it has no dimensions")) };
    let rows: usize = outer.iter().product();
    let (scale_tensor, scales, groups) = module.by_rows(rows)?;
    let group = module.group(cols, groups)?;
    let cells = Cells { bits: 8, order: Order::Stream(cols), flip: 0x80, plus: 0 };
    let zeros = module.zero_points(8, rows, groups)?;
    module.entry(codes.shape.clone(), group, cells, (scale_tensor, scales), zeros, None)
}
