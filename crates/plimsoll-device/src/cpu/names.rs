//! Maps the device's enums to those of the kernels.

use plimsoll_kernels::{self as kernels, RopeStyle};

use crate::device::Activation;

pub(super) fn rope_style(interleaved: bool) -> RopeStyle {
    if interleaved { RopeStyle::Pairs } else { RopeStyle::Halves }
}

pub(super) fn kernel_activation(act: Activation) -> kernels::Activation {
    match act {
        Activation::Silu => kernels::Activation::Silu,
        Activation::GeluTanh => kernels::Activation::GeluTanh,
        Activation::Gelu => kernels::Activation::GeluErf,
        Activation::GeluQuick => kernels::Activation::GeluQuick,
        Activation::ClampedSwish => kernels::Activation::ClampedSwish,
        Activation::ReluSquared => kernels::Activation::ReluSquared,
        Activation::Softplus => kernels::Activation::Softplus,
        Activation::Tanh => kernels::Activation::Tanh,
        Activation::Sigmoid => kernels::Activation::Sigmoid,
    }
}
