//! The largest grids that a resize rule can yield: the candidates for a worst case.
//!
//! A rule keeps pixels within bounds, but not exactly: rounding, the floor of one patch per side, and rounding up of small
//! images all reach past the bound. For every short side this finds the longest long side that any legal image gets; a
//! cost that never falls with either side has its maximum on that line.

use super::round_half_even;

/// Largest ratio of the longer to the shorter side.
pub(crate) const ASPECT_MAX: u64 = 200;

/// A resize rule, reduced to the values that decide its sizes. Sides are counted in units of `factor` pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// Pixels per unit.
    pub factor: u64,
    /// Pixel bounds.
    pub min: u64,
    /// Upper bound, see `min`.
    pub max: u64,
    /// Frames that share the bounds, as the rule's comparison counts them (rounded).
    pub frames_compared: u64,
    /// Frames that share the bounds, as the rule's scaling counts them (true).
    pub frames: u64,
}

/// The long sides that small images are rounded up to, reused from one rule to the next. Computing them takes long, and they do not depend
/// on the most pixels.
#[derive(Debug, Default)]
pub(crate) struct RoundedUp(Option<(Rule, Vec<u64>)>);

impl RoundedUp {
    fn of(&mut self, rule: &Rule, prepare: impl Fn((u64, u64)) -> Option<(u64, u64)>) -> &[u64] {
        if !rule.rounds_up_far() {
            return &[];
        }
        let key = Rule { max: 0, ..*rule };
        if self.0.as_ref().is_none_or(|(known, _)| *known != key) {
            self.0 = Some((key, rule.rounded_up(prepare)));
        }
        self.0.as_ref().map_or(&[], |(_, longest)| longest)
    }
}

impl Rule {
    /// Returns the rule for one image.
    pub(crate) fn of_one(factor: u64, (min, max): (u64, u64)) -> Self {
        Self { factor, min, max, frames_compared: 1, frames: 1 }
    }

    /// Returns for every short side that occurs the longest long side. `prepare` returns the sides for [`Rule::resize`], none for an image
    /// that is refused.
    pub(crate) fn frontier(
        &self,
        known: &mut RoundedUp,
        prepare: impl Fn((u64, u64)) -> Option<(u64, u64)>,
    ) -> Vec<(u64, u64)> {
        let Rule { factor: f, min, max, frames_compared, frames } = *self;
        let most = max / (frames_compared * f * f);
        let strip = (ASPECT_MAX * max / frames).isqrt() / f;
        let rounded_up = known.of(self, prepare);
        let sides = most.isqrt().max((max / (frames * f * f)).isqrt()).max(rounded_up.len() as u64).max(1);
        let longest = |a: u64| {
            // Kept as it is: rounded to units, within the bounds, at most 200 times as long before rounding.
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

    /// Returns the longest side in pixels that rounds to `a` units.
    fn longest_rounding_to(&self, a: u64) -> u64 {
        let half_up = a * self.factor + self.factor / 2;
        if round_half_even(half_up, self.factor) == a { half_up } else { half_up - 1 }
    }

    /// Whether small images that are rounded up may become longer than all others.
    fn rounds_up_far(&self) -> bool {
        let Rule { factor: f, min, max, frames, frames_compared } = *self;
        // Scaled up, the true sides are x in (a - 1, a] and y = min / x, at most 200 x and rounded up too. So b is below
        // min / (a - 1) + 1. If twice `min` fits under `max`, images that keep their size reach further.
        let scaled = min.div_ceil(frames * f * f);
        let strip = (ASPECT_MAX * min / frames).isqrt() / f + 2;
        (2 * scaled + scaled.isqrt() + 3).max(strip) > max / (frames_compared * f * f)
    }

    /// Resizes sides that need no preparation.
    pub(crate) fn resize(&self, sides: (u64, u64)) -> (u64, u64) {
        let round = |side| round_half_even(side, self.factor) * self.factor;
        let (volume, true_volume) = (self.volume_compared(sides), sides.0 * sides.1 * self.frames);
        scale(sides, self.factor, (volume, true_volume), (round(sides.0), round(sides.1)), (self.min, self.max))
    }

    /// Returns the pixels that are compared with the bounds.
    fn volume_compared(&self, (h, w): (u64, u64)) -> u64 {
        round_half_even(h, self.factor) * round_half_even(w, self.factor) * self.factor.pow(2) * self.frames_compared
    }

    /// Returns the long sides that small images are rounded up to, by short side.
    ///
    /// While an image of one short side grows longer and is still enlarged, the enlarged short side never grows and the long
    /// side never shrinks. So of all images that get one short side, the longest gets the longest long side.
    fn rounded_up(&self, prepare: impl Fn((u64, u64)) -> Option<(u64, u64)>) -> Vec<u64> {
        let Rule { factor: f, min, frames, .. } = *self;
        let mut longest = vec![0; min.div_ceil(frames * f * f).isqrt() as usize + 2];
        let enlarged = |h, w| {
            let sides = prepare((h, w)).filter(|sides| self.volume_compared(*sides) < min)?;
            let (height, width) = self.resize(sides);
            Some((height.min(width) / f, height.max(width) / f))
        };
        for h in (1..).take_while(|h| self.volume_compared((*h, *h)) < min) {
            let (mut from, past) = (h, h * ASPECT_MAX + 1);
            while from < past
                && let Some((a, _)) = enlarged(h, from)
            {
                let end = first_without(from, past, |w| enlarged(h, w).is_some_and(|(short, _)| short == a));
                let long = enlarged(h, end - 1).map_or(0, |(_, long)| long);
                if let Some(longest) = longest.get_mut(a as usize - 1) {
                    *longest = long.max(*longest);
                }
                from = end;
            }
        }
        longest
    }
}

/// Returns the first number of a range for which `holds` is false; it is true up to some number, and false from there on.
fn first_without(from: u64, end: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (from, end);
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

/// Carries out the common last step of the image and the video rule. `volume`: rounded and true pixels, over all frames that
/// share the bounds.
pub(crate) fn scale(
    (h, w): (u64, u64),
    factor: u64,
    volume: (u64, u64),
    rounded: (u64, u64),
    (min, max): (u64, u64),
) -> (u64, u64) {
    let f = factor as f64;
    if volume.0 > max {
        let beta = (volume.1 as f64 / max as f64).sqrt();
        let down = |side: u64| ((side as f64 / beta / f).floor() as u64 * factor).max(factor);
        return (down(h), down(w));
    }
    if volume.0 < min {
        let beta = (min as f64 / volume.1 as f64).sqrt();
        let up = |side: u64| (side as f64 * beta / f).ceil() as u64 * factor;
        return (up(h), up(w));
    }
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every small image is tried.
    fn tried(rule: &Rule, prepare: impl Fn((u64, u64)) -> Option<(u64, u64)>) -> Vec<u64> {
        let mut longest = vec![0; rule.rounded_up(&prepare).len()];
        for h in (1..).take_while(|h| rule.volume_compared((*h, *h)) < rule.min) {
            let images = (h..=h * ASPECT_MAX).filter_map(|w| prepare((h, w)));
            for sides in images.take_while(|sides| rule.volume_compared(*sides) < rule.min) {
                let (height, width) = rule.resize(sides);
                let short = (height.min(width) / rule.factor) as usize;
                longest[short - 1] = longest[short - 1].max(height.max(width) / rule.factor);
            }
        }
        longest
    }

    #[test]
    fn small_images_reach_what_trying_all_of_them_finds() {
        for factor in [8, 28, 32, 33] {
            let strip = |(h, w): (u64, u64)| {
                let enlarge = (factor as f64 / h as f64).max(1.0);
                let (h, w) = ((h as f64 * enlarge) as u64, (w as f64 * enlarge) as u64);
                (w <= h * ASPECT_MAX).then_some((h, w))
            };
            for min in [1, 700, 56 * 56, 20_000] {
                for (frames_compared, frames) in [(1, 1), (2, 1), (4, 3), (8, 8), (130, 129)] {
                    let rule = Rule { factor, min, max: 2 * min, frames_compared, frames };
                    assert_eq!(rule.rounded_up(strip), tried(&rule, strip), "{rule:?}");
                    assert_eq!(rule.rounded_up(Some), tried(&rule, Some), "{rule:?}");
                }
            }
        }
    }
}
