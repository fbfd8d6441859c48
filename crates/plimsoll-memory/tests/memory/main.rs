//! Limits of the host, sizing of the pool, and leases between processes.

mod auto_profile;
mod host_limits;
#[cfg(unix)]
mod leases;
