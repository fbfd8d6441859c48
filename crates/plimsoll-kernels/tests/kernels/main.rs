//! The kernels through their public functions. Only what needs a private part is tested beside the code: a test there has
//! all it calls compiled a second time, and kernels are thousands of functions.

mod attention;
mod attention_bf16;
mod conv;
mod delta;
mod kv;
mod linear;
mod linear_bf16;
mod pack;
mod route;
mod rows;
mod support;
