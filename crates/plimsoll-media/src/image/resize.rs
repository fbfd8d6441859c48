//! The bicubic, bilinear and Lanczos resize with antialiasing of torchvision, bit for bit.
//!
//! Two passes over bytes, across first, each with weights in 16-bit fixed point. This is the definition of PyTorch's kernel for 8-bit
//! images, which the Hugging Face processors run. Pillow's own resize has finer weights and differs by up to 1 of
//! 255 if it makes its passes in the same order.

use std::f64::consts::PI;
use std::ops::Range;

use super::Rgb;
use crate::Size;

/// The cubic's free parameter, as in Pillow and in torch with antialiasing.
const A: f64 = -0.5;

/// The weights of pixels in a resize.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Filter {
    /// A triangle over two pixels.
    Bilinear,
    /// A cubic over four pixels.
    #[default]
    Bicubic,
    /// A windowed sinc over six pixels.
    Lanczos,
}

impl Filter {
    /// The filter with this number in Pillow and in the files of processors.
    pub(crate) fn of_pillow(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Lanczos),
            2 => Some(Self::Bilinear),
            3 => Some(Self::Bicubic),
            _ => None,
        }
    }

    /// Returns the pixels to each side that have a weight, if the image is not reduced.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// Returns the weight of a pixel at distance `x`.
    fn weight(self, x: f64) -> f64 {
        match self {
            Self::Bilinear => (1.0 - x.abs()).max(0.0),
            Self::Bicubic => cubic(x),
            Self::Lanczos => lanczos(x),
        }
    }
}

/// For every output position, its input positions and their weights.
struct Weights {
    spans: Vec<Range<usize>>,
    /// Weights of all spans, one after the other.
    values: Vec<i32>,
    /// Fraction bits of the weights.
    precision: u32,
}

/// Resizes an image.
pub fn resize(image: &Rgb, to: Size, filter: Filter) -> Rgb {
    let (height, width) = (image.size.height as usize, image.size.width as usize);
    let (rows, columns) = (to.height as usize, to.width as usize);
    let across = if columns == width {
        image.data.clone()
    } else {
        let weights = Weights::new(width, columns, filter);
        let mut rows = Vec::with_capacity(height * columns * 3);
        image.data.chunks_exact(3 * width).for_each(|row| weights.apply(row, 3, &mut rows));
        rows
    };
    debug_assert_eq!(across.len(), height * columns * 3);
    if rows == height {
        return Rgb { size: to, data: across };
    }
    let mut data = Vec::with_capacity(rows * columns * 3);
    Weights::new(height, rows, filter).apply(&across, 3 * columns, &mut data);
    Rgb { size: to, data }
}

/// Returns the most weights of an output position.
fn most_weights(from: usize, to: usize, filter: Filter) -> usize {
    let stretch = (from as f64 / to as f64).max(1.0);
    (2.0 * filter.support() * stretch).ceil() as usize + 2
}

/// Returns the bytes that [`resize`] takes beside the image and its result: the image after its first pass, and weights.
pub fn resize_bytes(from: Size, to: Size, filter: Filter) -> u64 {
    let weights = |from: u32, to: u32| match from == to {
        true => 0,
        false => {
            let each = most_weights(from as usize, to as usize, filter) * (size_of::<f64>() + size_of::<i32>());
            u64::from(to) * (each + size_of::<Range<usize>>()) as u64
        }
    };
    let halfway = 3 * u64::from(from.height) * u64::from(to.width);
    let sums = 3 * (size_of::<i32>() as u64) * u64::from(to.width);
    halfway + weights(from.width, to.width).max(weights(from.height, to.height) + sums)
}

impl Weights {
    fn new(from: usize, to: usize, filter: Filter) -> Self {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let support = filter.support() * stretch;
        let mut spans = Vec::with_capacity(to);
        let mut exact: Vec<f64> = Vec::with_capacity(to * most_weights(from, to, filter));
        for i in 0..to {
            let center = scale * (i as f64 + 0.5);
            let first = (center - support + 0.5).max(0.0) as usize;
            let last = ((center + support + 0.5) as usize).min(from);
            let start = exact.len();
            exact.extend((first..last).map(|j| filter.weight((j as f64 - center + 0.5) * (1.0 / stretch))));
            let sum: f64 = exact[start..].iter().sum();
            exact[start..].iter_mut().for_each(|weight| *weight /= sum);
            spans.push(first..last);
        }
        // The most fraction bits that leave the largest weight below 2^15.
        let largest = exact.iter().copied().fold(0.0, f64::max);
        let fits = |bits: u32| ((0.5 + largest * f64::from(1 << bits)) as i64) < 1 << 15;
        let precision = (1..=22).take_while(|&bits| fits(bits)).last().unwrap_or(0);
        let fixed = |weight: f64| (weight * f64::from(1 << precision) + 0.5_f64.copysign(weight)) as i32;
        Self { spans, values: exact.into_iter().map(fixed).collect(), precision }
    }

    /// Combines units of `stride` bytes.
    fn apply(&self, input: &[u8], stride: usize, output: &mut Vec<u8>) {
        let mut sums = vec![0_i32; stride];
        let mut weights = self.values.as_slice();
        for span in &self.spans {
            let (own, rest) = weights.split_at(span.len());
            weights = rest;
            // One half, so that the shift rounds.
            sums.fill(if self.precision > 0 { 1 << (self.precision - 1) } else { 0 });
            for (unit, &weight) in input[span.start * stride..span.end * stride].chunks_exact(stride).zip(own) {
                for (sum, &value) in sums.iter_mut().zip(unit) {
                    *sum += weight * i32::from(value);
                }
            }
            output.extend(sums.iter().map(|&sum| (sum >> self.precision).clamp(0, 255) as u8));
        }
    }
}

/// Returns the cubic convolution kernel's value.
fn cubic(x: f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// Returns the value of the sinc, in a window that is the sinc's middle.
fn lanczos(x: f64) -> f64 {
    let sinc = |x: f64| if x == 0.0 { 1.0 } else { (x * PI).sin() / (x * PI) };
    if (-3.0..3.0).contains(&x) { sinc(x) * sinc(x / 3.0) } else { 0.0 }
}
