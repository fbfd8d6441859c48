//! Commands for a prefix cache on disk.

use std::path::PathBuf;

use clap::Subcommand;

/// The subcommands of `cache`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// List the contents of the cache, by model and build.
    Ls {
        /// The directory.
        dir: PathBuf,
    },
    /// Remove the whole cache, or the files of one model and build. No server may use it.
    Rm {
        /// The directory.
        dir: PathBuf,
        /// Model and build to remove: the first column of `ls`.
        model: Option<String>,
    },
    /// Read all files of the cache and remove damaged ones. No server may use it.
    Verify {
        /// The directory.
        dir: PathBuf,
        /// The key of an encrypted directory; without it checksums alone are compared.
        #[arg(long, value_name = "FILE")]
        cache_key_file: Option<PathBuf>,
    },
}
