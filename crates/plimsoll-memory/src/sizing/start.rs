//! The entry point: a start-up in the mode of the configuration.

use super::generations::Generations;
use super::outcome::Outcome;
use super::pinned;
use super::planned;
use super::run::Run;
use super::{Mode, ProfileConfig, SizingError};

/// Sizes a server and returns it built and tested.
///
/// # Errors
/// [`SizingError`]; no generation is alive then.
pub fn auto_profile<D: Generations>(cfg: &ProfileConfig, device: &mut D) -> Result<Outcome<D::G>, SizingError> {
    let mut run = Run::new(cfg, device);
    run.agree(cfg.validate())?;
    match cfg.mode {
        Mode::Auto => run.auto(),
        Mode::Planned { tokens, state_slots } => planned::start(run, tokens, state_slots),
        Mode::Pinned { tokens } => pinned::start(run, tokens, false),
        Mode::Shadow { running_tokens } => pinned::start(run, running_tokens, true),
    }
}
