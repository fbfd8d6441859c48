//! The [`plimsoll_device::Device`] trait on GPUs, through wgpu: Vulkan, and Metal.
//!
//! Kernels are WGSL, written by this crate for the packings and shapes of a model. They multiply weights in the CPU device's packing,
//! byte for byte. Every output of a row is summed in one order, for any other rows in the step. So a row's answer is the same alone or
//! in a batch, on one device and driver.
//!
//! Without the feature `wgpu` this crate has the text of the kernels and the layout of weights; with it, also the device.

#![deny(unsafe_code)]

#[cfg(feature = "wgpu")]
mod adapter;
#[cfg(feature = "wgpu")]
mod budget;
#[cfg(feature = "wgpu")]
mod context;
#[cfg(feature = "wgpu")]
mod device;
#[cfg(feature = "wgpu")]
mod error;
pub mod kernel;
#[cfg(feature = "wgpu")]
mod memory;
#[cfg(all(feature = "wgpu", feature = "noop"))]
mod noop;
#[cfg(feature = "wgpu")]
mod record;
pub mod segments;
#[cfg(feature = "wgpu")]
mod weights;

#[cfg(feature = "wgpu")]
pub use adapter::{Adapter, AdapterChoice, Limits};
#[cfg(feature = "wgpu")]
pub use budget::OwnMemory;
#[cfg(feature = "wgpu")]
pub use context::Context;
#[cfg(feature = "wgpu")]
pub use device::GpuDevice;
#[cfg(feature = "wgpu")]
pub use error::GpuError;
#[cfg(feature = "wgpu")]
pub use memory::{GpuMemory, Sizes};
#[cfg(all(feature = "wgpu", feature = "noop"))]
pub use noop::{NoopGpu, stand_in};
#[cfg(feature = "wgpu")]
pub use weights::GpuWeights;
