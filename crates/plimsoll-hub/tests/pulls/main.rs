//! Black-box tests of pulling: a loopback server stands for the hub, a shell script for pip.

mod cache_care;
mod fixtures;
mod here;
mod hub_repos;
mod processes;
mod real_sources;
mod server;
mod wheels;
