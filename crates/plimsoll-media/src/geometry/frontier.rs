//! The largest grids that a resize rule can yield: what a worst case is taken over.
//!
//! A rule keeps pixels within bounds, but not exactly: rounding, the floor of one patch per side, and rounding up of small
//! images all reach past the bound. For every short side this finds the longest long side that any legal image gets; a
//! cost that never falls with either side has its maximum on that line.

use super::round_half_even;

/// No side may be more than this many times the other.
pub(crate) const ASPECT_MAX: u64 = 200;

/// A resize rule, reduced to what decides the sizes it can yield. Sides are counted in units of `factor` pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// Pixels per unit.
    pub factor: u64,
    /// Pixel bounds.
    pub min: u64,
    /// See `min`.
    pub max: u64,
    /// Frames that share the bounds, as the rule's comparison counts them (rounded).
    pub frames_compared: u64,
    /// Frames that share the bounds, as the rule's scaling counts them (true).
    pub frames: u64,
}

/// What small images are rounded up to, kept from one rule to the next: that takes long, and the most pixels do not change it.
#[derive(Debug, Default)]
pub(crate) struct RoundedUp(Option<(Rule, Vec<u64>)>);

impl RoundedUp {
    fn of(&mut self, rule: &Rule, resize: impl Fn(u64, u64) -> Option<(u64, u64)>) -> &[u64] {
        if !rule.rounds_up_far() {
            return &[];
        }
        let key = Rule { max: 0, ..*rule };
        if self.0.as_ref().is_none_or(|(known, _)| *known != key) {
            self.0 = Some((key, rule.rounded_up(resize)));
        }
        self.0.as_ref().map_or(&[], |(_, longest)| longest)
    }
}

impl Rule {
    /// For every short side that occurs, the longest long side.
    pub(crate) fn frontier(
        &self,
        known: &mut RoundedUp,
        resize: impl Fn(u64, u64) -> Option<(u64, u64)>,
    ) -> Vec<(u64, u64)> {
        let Rule { factor: f, min, max, frames_compared, frames } = *self;
        let most = max / (frames_compared * f * f);
        let strip = (ASPECT_MAX * max / frames).isqrt() / f;
        let rounded_up = known.of(self, resize);
        let sides = most.isqrt().max((max / (frames * f * f)).isqrt()).max(rounded_up.len() as u64).max(1);
        let longest = |a: u64| {
            // As it is: rounded to units, within the bounds, at most 200 times as long before rounding.
            let near = round_half_even(ASPECT_MAX * self.longest_rounding_to(a), f);
            let kept = near.min(most / a);
            let kept = if a * kept * f * f * frames_compared >= min { kept } else { 0 };
            // Scaled down: the true sides are x in [a, a + 1) and max / x, so x cannot be below sqrt(max / 200).
            let down_possible = ASPECT_MAX * (a + 1) * (a + 1) * f * f * frames > max;
            let down = if down_possible { strip.min(max / (frames * f * f * a)) } else { 0 };
            // Scaled down to less than one unit, which is raised to one: the long side keeps its length.
            let raised = if a == 1 && ASPECT_MAX * f * f * frames > max { strip } else { 0 };
            let up = rounded_up.get(a as usize - 1).copied().unwrap_or(0);
            kept.max(down).max(raised).max(up)
        };
        (1..=sides).map(|a| (a, longest(a))).filter(|&(a, b)| b >= a).collect()
    }

    /// The longest side in pixels that rounds to `a` units.
    fn longest_rounding_to(&self, a: u64) -> u64 {
        let half_up = a * self.factor + self.factor / 2;
        if round_half_even(half_up, self.factor) == a { half_up } else { half_up - 1 }
    }

    /// Whether small images that are rounded up may become longer than all others.
    fn rounds_up_far(&self) -> bool {
        let Rule { factor: f, min, max, frames, frames_compared } = *self;
        // Scaled up, the true sides are x in (a - 1, a] and y = min / x, at most 200 x and rounded up too. So b is below
        // min / (a - 1) + 1, and where twice `min` fits under `max`, what is kept as it is reaches further.
        let scaled = min.div_ceil(frames * f * f);
        let strip = (ASPECT_MAX * min / frames).isqrt() / f + 2;
        (2 * scaled + scaled.isqrt() + 3).max(strip) > max / (frames_compared * f * f)
    }

    /// Long sides that small images are rounded up to, by short side.
    fn rounded_up(&self, resize: impl Fn(u64, u64) -> Option<(u64, u64)>) -> Vec<u64> {
        let Rule { factor: f, min, frames, frames_compared, .. } = *self;
        // Every small image is tried: those that the rule enlarges.
        let mut longest = vec![0; min.div_ceil(frames * f * f).isqrt() as usize + 2];
        for h in 1.. {
            if round_half_even(h, f) * round_half_even(h, f) * f * f * frames_compared >= min {
                break;
            }
            for w in h..=h * ASPECT_MAX {
                if round_half_even(h, f) * round_half_even(w, f) * f * f * frames_compared >= min {
                    break;
                }
                let Some((height, width)) = resize(h, w) else { continue };
                let (a, b) = ((height / f).min(width / f), (height / f).max(width / f));
                if let Some(longest) = longest.get_mut(a as usize - 1) {
                    *longest = b.max(*longest);
                }
            }
        }
        longest
    }
}
