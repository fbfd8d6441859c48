//! Flags of `plan --k8s`.

use std::ffi::OsString;

use clap::Args;

use super::reading::ReadingArgs;
use super::serve::DRAIN_SECONDS;
use super::values::seconds;

/// Flags of `plan` about a cluster.
#[derive(Debug, Args)]
pub struct K8sArgs {
    /// Print a Kubernetes manifest (Deployment and Service) with this plan's total as its memory limit.
    #[arg(long, conflicts_with_all = ["json", "probe", "users", "context", "images", "audio_seconds"])]
    pub k8s: bool,
    /// Container image of the manifest, as deploy/Containerfile makes it.
    #[arg(long, default_value = concat!("plimsoll:", env!("CARGO_PKG_VERSION")))]
    pub container_image: String,
    /// Number of pods in the manifest.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub replicas: u32,
    /// Seconds that running requests have to finish when a pod is stopped.
    #[arg(long, default_value_t = DRAIN_SECONDS, value_parser = seconds(0))]
    pub drain_seconds: u64,
    /// Name of the model in the API of the manifest's server (repeatable).
    #[arg(long)]
    pub served_model_name: Vec<String>,
    /// Flags about replies and embeddings. They do not change the plan; the manifest passes them on.
    #[command(flatten)]
    pub reading: ReadingArgs,
    /// Further flags of the manifest's server: all settings of this call that are flags of `serve`.
    #[arg(skip)]
    pub serve_flags: Vec<OsString>,
}
