//! Commands for a prefix cache on disk.

use std::path::PathBuf;

use clap::Subcommand;

/// What to do with a prefix cache on disk.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// List what is in it, by model and build.
    Ls {
        /// The directory.
        dir: PathBuf,
    },
    /// Remove all of it, or what one model and build has. No server may use it.
    Rm {
        /// The directory.
        dir: PathBuf,
        /// The first column of `ls`.
        model: Option<String>,
    },
    /// Read all of it and remove files that are damaged. No server may use it.
    Verify {
        /// The directory.
        dir: PathBuf,
        /// The key of an encrypted directory; without it checksums alone are compared.
        #[arg(long, value_name = "FILE")]
        cache_key_file: Option<PathBuf>,
    },
}
