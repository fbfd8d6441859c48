//! What-if: how many users, how long, under which line. Asks the planner, the same that start-up asks (I8), many times.
//!
//! Every user is given the whole context in pages of their own: what fits here needs no preemption and no luck with prefixes.

use plimsoll_device::PAGE_TOKENS;
use plimsoll_formats::Checkpoint;
use serde::Serialize;

use crate::api::options::Options;
use crate::media::MediaPlan;
use crate::plan::advice::{Alternative, alternatives};
use crate::plan::{Blueprint, Line, PlanError};

/// The most users that are considered; more rows than this no step has.
const USERS_MAX: u64 = 1 << 16;

/// A number of users, each with a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Users at once.
    pub users: u64,
    /// Tokens of prompt and output of each.
    pub context: u64,
    /// Pictures of the largest size in each prompt.
    pub images: u64,
    /// Seconds of one sound in each prompt; 0 without one.
    pub audio_seconds: u64,
}

/// What changing one flag would buy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Knob {
    /// The flag.
    pub flag: &'static str,
    /// The value to give it.
    pub value: String,
    /// Bytes that the asked load needs with it.
    pub needed_bytes: u64,
    /// The most users of the asked context with it.
    pub users_max: u64,
}

/// The answer. All sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// What was asked.
    pub load: Load,
    /// Whether it fits under the line.
    pub fits: bool,
    /// What it needs in all.
    pub needed_bytes: u64,
    /// The line.
    pub limit_bytes: u64,
    /// The most users of that context.
    pub users_max: u64,
    /// The longest context for that many users.
    pub context_max: u64,
    /// What each flag would buy, the best first; only those with which more users fit, or the asked load does.
    pub knobs: Vec<Knob>,
}

/// One model under one line.
struct Asked<'a> {
    options: Options,
    threads: usize,
    line: &'a Line,
}

/// Answers for `load`.
///
/// # Errors
/// [`PlanError`] when nothing can be planned at all: an option out of range, a context longer than the model's, a broken checkpoint.
pub fn what_if(
    checkpoint: &Checkpoint,
    options: &Options,
    threads: usize,
    line: &Line,
    load: Load,
) -> Result<Answer, PlanError> {
    let asked = Asked { options: options.clone(), threads, line };
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
    let needed_bytes = asked.needed(&blueprint, load)?;
    let users_max = asked.users_max(&blueprint, load)?;
    let context_max = largest(longest, |context| asked.fits(&blueprint, Load { context, ..load }))?;
    let mut knobs = Vec::new();
    let media = blueprint.media_plan(options)?;
    for Alternative { flag, value, options } in alternatives(options, media.as_ref()) {
        let other = Asked { options, threads, line };
        let blueprint = Blueprint::new(checkpoint, &other.options)?;
        let knob = Knob {
            flag,
            value,
            needed_bytes: other.needed(&blueprint, load)?,
            users_max: other.users_max(&blueprint, load)?,
        };
        let makes_it_fit = knob.needed_bytes <= line.bytes && needed_bytes > line.bytes;
        if knob.users_max > users_max || makes_it_fit {
            knobs.push(knob);
        }
    }
    knobs.sort_by_key(|knob| (std::cmp::Reverse(knob.users_max), knob.needed_bytes));
    Ok(Answer {
        load,
        fits: needed_bytes <= line.bytes,
        needed_bytes,
        limit_bytes: line.bytes,
        users_max,
        context_max,
        knobs,
    })
}

/// Pictures and sounds need a model that takes them, and a context that holds them.
fn check_media(media: Option<&MediaPlan>, load: Load) -> Result<(), PlanError> {
    let problem = |flag, problem| Err(PlanError::Option { flag, problem });
    let (images, seconds, context) = (load.images, load.audio_seconds, load.context);
    let longest = media.map_or(0, MediaPlan::audio_seconds);
    match media {
        _ if images == 0 && seconds == 0 => Ok(()),
        None if images > 0 => problem("--images", format!("is {images}, but this model takes text only")),
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
        Some(media) if images * media.image_tokens() + media.sound(seconds).0 >= context => {
            let tokens = media.sound(seconds).0;
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
        let media = if some { blueprint.media_plan(&self.options)? } else { None };
        let of =
            |images, sounds| media.as_ref().map_or((0, 0), |media| media.bytes_of(images, sounds, load.audio_seconds));
        // Encoder outputs of one request at a time; pixels and spectrograms of all users.
        let sounds = u64::from(load.audio_seconds > 0);
        let (outputs, _) = of(load.images.max(2), sounds);
        let (_, pixels) = of(load.images * load.users, sounds * load.users);
        Ok(Options {
            encoder_output_bytes: self.options.encoder_output_bytes.or(some.then_some(outputs)),
            media_bytes: self.options.media_bytes.max(pixels),
            running_max_req_size: users,
            graph_max_batch_size: users,
            batch_max_tokens: self.options.batch_max_tokens.max(users),
            max_req_total_len: Some(load.context as usize),
            max_total_token_num: Some(load.users * load.context.next_multiple_of(PAGE_TOKENS as u64)),
            ..self.options.clone()
        })
    }

    /// Bytes that a server for this load plans.
    fn needed(&self, blueprint: &Blueprint, load: Load) -> Result<u64, PlanError> {
        match blueprint.try_plan(&self.options(blueprint, load)?, self.threads, self.line) {
            Ok(planned) => {
                // Where state is short the planner plans for fewer at once; the rest is what they lack.
                let missing = load.users.saturating_sub(planned.step.running as u64);
                Ok(planned.plan.total().saturating_add(missing.saturating_mul(planned.sizing.request_state_bytes())))
            }
            Err(PlanError::DoesNotFit(shortfall)) => Ok(shortfall.needed),
            Err(error) => Err(error),
        }
    }

    fn fits(&self, blueprint: &Blueprint, load: Load) -> Result<bool, PlanError> {
        Ok(self.needed(blueprint, load)? <= self.line.bytes)
    }

    fn users_max(&self, blueprint: &Blueprint, load: Load) -> Result<u64, PlanError> {
        largest(USERS_MAX, |users| self.fits(blueprint, Load { users, ..load }))
    }
}

/// The largest number up to `most` that fits, 0 if none does; what fits must go on fitting for less.
fn largest(most: u64, mut fits: impl FnMut(u64) -> Result<bool, PlanError>) -> Result<u64, PlanError> {
    // Doubling first: large loads are dear to plan, and most answers are small.
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
