//! What-if answers: how many users with how long a context fit under which limit. They ask the start-up planner (I8) many times.
//!
//! Every user gets the whole context in pages that no other user shares. A load that fits here needs no preemption and no prefix hits.

use plimsoll_device::PAGE_TOKENS;
use plimsoll_formats::Checkpoint;
use plimsoll_memory::Component;
use serde::Serialize;

use crate::api::options::Options;
use crate::media::MediaPlan;
use crate::plan::advice::{Alternative, alternatives};
use crate::plan::{Blueprint, MemoryLimit, PlanError};

/// The most users that are considered: no step has more rows.
const USERS_MAX: u64 = 1 << 16;

/// A limit above every plan.
const EVERYTHING: u64 = 1 << 50;

/// A number of users, each with a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Users at once.
    pub users: u64,
    /// Tokens of prompt and output of each.
    pub context: u64,
    /// Images of the largest size in each prompt.
    pub images: u64,
    /// Seconds of one audio clip in each prompt; 0 without one.
    pub audio_seconds: u64,
}

/// The effect of changing one flag.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Knob {
    /// The flag.
    pub flag: &'static str,
    /// The value to give it.
    pub value: String,
    /// Bytes that the asked load needs with it.
    pub needed_bytes: u64,
    /// Bytes that the load needs of a GPU's own memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_needed_bytes: Option<u64>,
    /// The most users of the asked context with the flag.
    pub users_max: u64,
}

/// A load's need of a GPU's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceNeed {
    /// Bytes that the load needs.
    pub needed_bytes: u64,
    /// Bytes that this process may use.
    pub limit_bytes: u64,
}

/// The answer. All sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// The load that was asked about.
    pub load: Load,
    /// Whether it fits under the limit.
    pub fits: bool,
    /// Bytes that it needs in all, a GPU's own memory excluded.
    pub needed_bytes: u64,
    /// The memory limit.
    pub limit_bytes: u64,
    /// Need and limit in a GPU's own memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceNeed>,
    /// The most users of the asked context.
    pub users_max: u64,
    /// The longest context for the asked number of users.
    pub context_max: u64,
    /// The effect of each flag, the best first. Flags are listed that make room for more users, or for the asked load.
    pub knobs: Vec<Knob>,
}

/// Bytes that a load needs.
struct Needed {
    /// Bytes of the machine's memory, and the limit on it.
    host: u64,
    limit: u64,
    /// Bytes of a GPU's own memory.
    device: Option<u64>,
    /// Whether the planner found a plan. Otherwise the load exceeds a limit or the largest buffer of a GPU.
    planned: bool,
}

/// One set of options under one limit.
struct Asked<'a> {
    options: Options,
    threads: usize,
    limit: &'a MemoryLimit,
}

/// Answers for `load`.
///
/// # Errors
/// [`PlanError`] when nothing can be planned at all: an option out of range, a context longer than the model's, a broken checkpoint.
pub fn what_if(
    checkpoint: &Checkpoint,
    options: &Options,
    threads: usize,
    limit: &MemoryLimit,
    load: Load,
) -> Result<Answer, PlanError> {
    let asked = Asked { options: options.clone(), threads, limit };
    let blueprint = Blueprint::new(checkpoint, options)?;
    if blueprint.encoder.is_some() {
        let problem =
            "asks for room for keys and values; an encoder keeps none: `plan` without it says everything".into();
        return Err(PlanError::Option { flag: "--users", problem });
    }
    let longest = blueprint.max_context as u64;
    let out_of_range =
        |flag, value, most| PlanError::Option { flag, problem: format!("is {value}; 1 to {most} are allowed") };
    if !(1..=USERS_MAX).contains(&load.users) {
        return Err(out_of_range("--users", load.users, USERS_MAX));
    }
    if !(1..=longest).contains(&load.context) {
        return Err(out_of_range("--context", load.context, longest));
    }
    check_media(blueprint.media_plan(options)?.as_ref(), load)?;
    let needed = asked.needed(&blueprint, load)?;
    let fits = asked.has_room(&needed);
    let users_max = asked.users_max(&blueprint, load)?;
    let context_max = largest(longest, |context| asked.fits(&blueprint, Load { context, ..load }))?;
    let mut knobs = Vec::new();
    let media = blueprint.media_plan(options)?;
    for Alternative { flag, value, options } in alternatives(options, media.as_ref()) {
        let other = Asked { options, threads, limit };
        let blueprint = Blueprint::new(checkpoint, &other.options)?;
        let with = other.needed(&blueprint, load)?;
        let makes_it_fit = other.has_room(&with) && !fits;
        let users_with = other.users_max(&blueprint, load)?;
        if users_with > users_max || makes_it_fit {
            let (needed_bytes, device_needed_bytes) = (with.host, with.device);
            knobs.push(Knob { flag, value, needed_bytes, device_needed_bytes, users_max: users_with });
        }
    }
    let bytes = |knob: &Knob| knob.device_needed_bytes.unwrap_or(0).saturating_add(knob.needed_bytes);
    knobs.sort_by_key(|knob| (std::cmp::Reverse(knob.users_max), bytes(knob)));
    let of_device = |(needed_bytes, limit_bytes)| DeviceNeed { needed_bytes, limit_bytes };
    Ok(Answer {
        load,
        fits,
        needed_bytes: needed.host,
        limit_bytes: needed.limit,
        device: needed.device.zip(asked.device_limit()).map(of_device),
        users_max,
        context_max,
        knobs,
    })
}

/// The memory that a load needs, and the bytes read for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Need {
    /// Bytes of the plan.
    pub bytes: u64,
    /// Bytes of weights among them.
    pub weight_bytes: u64,
    /// Bytes of weights that one decoded token reads; of an encoder, one input.
    pub read_bytes: u64,
    /// Tokens that the model's context has.
    pub context_max: u64,
}

/// Returns the need of a server for `load`, without any memory limit. An encoder has no load.
///
/// # Errors
/// [`PlanError`] when nothing can be planned at all.
pub fn need(checkpoint: &Checkpoint, options: &Options, threads: usize, load: Load) -> Result<Need, PlanError> {
    let blueprint = Blueprint::new(checkpoint, options)?;
    let limit = MemoryLimit::of_budget(EVERYTHING, "no limit");
    let asked = Asked { options: options.clone(), threads, limit: &limit };
    let context_max = blueprint.max_context as u64;
    let load = Load { context: load.context.min(context_max), ..load };
    let options = match blueprint.encoder {
        Some(_) => options.clone(),
        None => asked.options(&blueprint, load)?,
    };
    let planned = blueprint.try_plan(&options, threads, &limit)?;
    let [_, one] = planned.work;
    let weight_bytes = blueprint.weights.bytes as u64;
    Ok(Need { bytes: planned.plan.total(), weight_bytes, read_bytes: one.weight_bytes, context_max })
}

/// Checks that the model takes the load's images and audio clips, and that its context holds them.
fn check_media(media: Option<&MediaPlan>, load: Load) -> Result<(), PlanError> {
    let problem = |flag, problem| Err(PlanError::Option { flag, problem });
    let (images, seconds, context) = (load.images, load.audio_seconds, load.context);
    let longest = media.map_or(0, MediaPlan::audio_seconds);
    match media {
        _ if images == 0 && seconds == 0 => Ok(()),
        None if images > 0 => problem("--images", format!("is {images}, but this model takes text only")),
        Some(media) if images > 0 && media.image_tokens() == 0 => {
            problem("--images", format!("is {images}, but this model takes no images"))
        }
        _ if seconds > 0 && longest == 0 => {
            problem("--audio-seconds", format!("is {seconds}, but this model takes no audio"))
        }
        _ if seconds > longest => problem(
            "--audio-seconds",
            format!("is {seconds}; the longest audio input has {longest} (--max-audio-seconds)"),
        ),
        Some(media) if images.saturating_mul(media.image_tokens()) >= context => {
            let tokens = media.image_tokens();
            problem(
                "--images",
                format!(
                    "is {images}: of {tokens} tokens each they leave no room in --context {context}; --max-image-pixels makes them smaller"
                ),
            )
        }
        Some(media) if images * media.image_tokens() + media.audio(seconds).0 >= context => {
            let tokens = media.audio(seconds).0;
            problem("--audio-seconds", format!("is {seconds}: {tokens} tokens leave no room in --context {context}"))
        }
        _ => Ok(()),
    }
}

impl Asked<'_> {
    /// The options of a server for exactly this load.
    fn options(&self, blueprint: &Blueprint, load: Load) -> Result<Options, PlanError> {
        let users = load.users as usize;
        let some = load.images > 0 || load.audio_seconds > 0;
        // The most media of a prompt depend on the context.
        let context = Some(load.context as usize);
        let of_load = Options { max_req_total_len: context, ..self.options.clone() };
        let media = if some { blueprint.media_plan(&of_load)? } else { None };
        let of =
            |images, clips| media.as_ref().map_or((0, 0), |media| media.bytes_of(images, clips, load.audio_seconds));
        // Encoder outputs of one request at a time; pixels and spectrograms of all users.
        let clips = u64::from(load.audio_seconds > 0);
        let (outputs, _) = of(load.images.max(2), clips);
        let (_, pixels) = of(load.images * load.users, clips * load.users);
        Ok(Options {
            encoder_output_bytes: self.options.encoder_output_bytes.or(some.then_some(outputs)),
            media_bytes: self.options.media_bytes.max(pixels),
            running_max_req_size: users,
            graph_max_batch_size: users,
            batch_max_tokens: self.options.batch_max_tokens.max(users),
            max_req_total_len: context,
            max_total_token_num: Some(load.users * load.context.next_multiple_of(PAGE_TOKENS as u64)),
            ..self.options.clone()
        })
    }

    /// Returns the bytes that a server for this load plans.
    fn needed(&self, blueprint: &Blueprint, load: Load) -> Result<Needed, PlanError> {
        let (plan, missing, planned) =
            match blueprint.try_plan(&self.options(blueprint, load)?, self.threads, self.limit) {
                Ok(planned) => {
                    // Where state is short, the planner plans for fewer requests at once. The missing bytes are those of the other
                    // requests.
                    let missing = load.users.saturating_sub(planned.requests() as u64);
                    (planned.plan, missing.saturating_mul(planned.sizing.request_state_bytes()), true)
                }
                Err(PlanError::DoesNotFit(shortfall)) => (shortfall.plan, 0, false),
                Err(error) => return Err(error),
            };
        let (host, limit) = (plan.total(), plan.limit);
        Ok(match plan.device {
            Some(_) => {
                // As many bytes as the emergency reserve has stay free in the GPU's memory.
                let taken = plan.device_total() + plan.bytes(Component::EmergencyReserve);
                Needed { host, limit, device: Some(taken.saturating_add(missing)), planned }
            }
            None => Needed { host: host.saturating_add(missing), limit, device: None, planned },
        })
    }

    /// Bytes of a GPU's own memory that this process may use.
    fn device_limit(&self) -> Option<u64> {
        match &self.limit.gpu {
            Some(Ok(gpu)) => gpu.own.as_ref().map(|own| own.bytes),
            _ => None,
        }
    }

    /// Whether the needed bytes are within the limits.
    fn has_room(&self, needed: &Needed) -> bool {
        let on_device = needed.device.is_none_or(|bytes| self.device_limit().is_some_and(|limit| bytes <= limit));
        needed.planned && needed.host <= needed.limit && on_device
    }

    fn fits(&self, blueprint: &Blueprint, load: Load) -> Result<bool, PlanError> {
        Ok(self.has_room(&self.needed(blueprint, load)?))
    }

    fn users_max(&self, blueprint: &Blueprint, load: Load) -> Result<u64, PlanError> {
        largest(USERS_MAX, |users| self.fits(blueprint, Load { users, ..load }))
    }
}

/// Returns the largest number up to `most` that fits, or 0 if none does. Every number below one that fits must fit as well.
fn largest(most: u64, mut fits: impl FnMut(u64) -> Result<bool, PlanError>) -> Result<u64, PlanError> {
    // Doubling first: large loads take long to plan, and most answers are small.
    let (mut good, mut bad) = (0, 1);
    while bad <= most && fits(bad)? {
        (good, bad) = (bad, bad * 2);
    }
    bad = bad.min(most + 1);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        match fits(middle)? {
            true => good = middle,
            false => bad = middle,
        }
    }
    Ok(good)
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn the_largest_is_found_at_every_edge() {
        for most in 1..40 {
            for edge in 0..=most {
                assert_eq!(largest(most, |n| Ok(n <= edge)).unwrap(), edge, "{edge} of {most}");
            }
        }
    }
}
