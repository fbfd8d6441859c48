//! The museum: ways in which other servers died, each as a test that this one does not. A test is named by the row of the
//! catalogue; the exhibition, with every row and what holds it, is `tests/museum/README.md` at the top of the repository.
//!
//! Everything goes over HTTP to the real binary, with fixture models that start in a quarter of a second. `broken.rs` shows
//! that exhibits fail where their protection is taken away.

mod accounting;
mod activation;
mod broken;
mod exhibition;
mod host;
#[path = "../common/http.rs"]
mod http;
#[path = "../common/image.rs"]
mod image;
mod isolation;
mod leaving;
#[path = "../common/limit.rs"]
mod limit;
mod media;
mod overload;
#[path = "../common/product.rs"]
mod product;
mod profiling;
mod stores;
mod streams;
mod unloading;
mod visitor;
