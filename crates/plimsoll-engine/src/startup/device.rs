//! The choice of a device for `--device auto`.

use plimsoll_formats::Checkpoint;
use plimsoll_memory::host::HostError;

use crate::api::options::{DeviceChoice, Options};
use crate::plan::Blueprint;
use crate::startup::host::Host;

/// Replaces `--device auto` by a GPU that supports the model and has room for it, or else by the host's cores. Software GPUs are not
/// considered. Returns the options, and a line for the log with the reason. Other choices stay, without a line.
///
/// # Errors
/// As for [`Host::read`].
pub fn choose_device(checkpoint: &Checkpoint, options: &Options) -> Result<(Options, Option<String>), HostError> {
    if options.device != DeviceChoice::Auto {
        return Ok((options.clone(), None));
    }
    let on_gpu = Options { device: DeviceChoice::Gpu(None), allow_software_gpu: false, ..options.clone() };
    let host = Host::read(&on_gpu)?;
    let planned = match &host.limit.gpu {
        Some(Ok(gpu)) if options.disk_cache.is_none() => {
            let planned = Blueprint::new(checkpoint, &on_gpu)
                .and_then(|blueprint| blueprint.try_plan(&on_gpu, host.threads, &host.limit));
            planned.map(|_| gpu.name.clone()).map_err(|error| error.to_string())
        }
        Some(Err(why)) => Err(why.clone()),
        _ => Err("--cache-dir copies pages of the host's memory".into()),
    };
    Ok(match planned {
        Ok(name) => (on_gpu, Some(format!("--device auto: {name}"))),
        Err(why) => {
            let why = why.lines().next().unwrap_or_default();
            let options = Options { device: DeviceChoice::Cpu, ..options.clone() };
            (options, Some(format!("--device auto: the CPU; no GPU is used: {why}")))
        }
    })
}
