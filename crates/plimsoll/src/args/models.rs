//! Flags of `models`.

use clap::Args;
use plimsoll_memory::host::MemoryBudget;

/// Flags of `models`.
#[derive(Debug, Args)]
pub struct ModelsArgs {
    /// List the models with a short name that fit this machine, the largest first.
    #[arg(long)]
    pub fits: bool,
    /// Users at once.
    #[arg(long, requires = "fits", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=65536))]
    pub users: u64,
    /// Tokens of each user, prompt and output together; a model with less context gets all of its own.
    #[arg(long, requires = "fits", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..))]
    pub context: u64,
    /// Memory limit to plan for: 4GiB, 1500M or 50% [default: the limit of the machine].
    #[arg(long, requires = "fits")]
    pub memory_budget: Option<MemoryBudget>,
    /// Print JSON.
    #[arg(long, requires = "fits")]
    pub json: bool,
}
