//! The regression museum: failures of other servers, each as a test that this server does not fail so. A test's name begins with the
//! id of its row in the catalogue. `tests/museum/README.md` at the top of the repository lists every row with its tests.
//!
//! Everything goes over HTTP to the real binary, with fixture models that start in a quarter of a second. `broken.rs` shows
//! that these tests fail without the protection that they guard.

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
