//! The real binary from outside: started as a process, spoken to over HTTP, through curl and through the official Python
//! clients, stopped by signals. Nothing here may call into the crates below; what is tested is what a user gets.
//!
//! One test binary, so that the workspace links it once. The default model is pulled on first use, see [`product::cache`].

mod cage;
mod clients;
mod commands;
mod curl;
mod deploy;
mod disconnects;
mod encoders;
mod http;
mod ledger;
mod media;
mod memory;
mod page;
mod plans;
mod product;
mod python;
mod schema;
mod serving;
mod shutdown;
