//! The real binary from outside: started as a process, used over HTTP, through curl and through the official
//! clients, stopped by signals. These tests must not call into the crates below: they test the program as users run it.
//!
//! One test binary, so that the workspace links it once. The default model is pulled on first use, see [`product::cache`].

mod bench;
mod cage;
mod clients;
mod commands;
mod curl;
mod demo;
mod deploy;
mod disconnects;
mod disk_cache;
mod docs;
mod doctor;
mod documents;
mod encoders;
mod hearing;
#[path = "../common/http.rs"]
mod http;
#[path = "../common/image.rs"]
mod image;
mod images;
mod k8s;
mod launch;
mod ledger;
#[path = "../common/limit.rs"]
mod limit;
mod lm_eval;
mod media;
mod memory;
mod packages;
mod packed_cache;
mod page;
mod plans;
#[path = "../common/product.rs"]
mod product;
mod python;
mod replay;
mod replicas;
mod saved;
mod scenario;
mod schema;
mod secrets;
mod serving;
mod several;
mod shutdown;
mod structured;
mod surroundings;
mod terminal;
mod tiles;
mod transcripts;
