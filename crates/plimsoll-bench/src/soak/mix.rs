//! The client profiles of a soak and their weights.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::golden_answers::GoldenAnswers;
use super::profile::ClientProfile;
use crate::prompts::Random;

/// Client profiles with their weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mix(Vec<(ClientProfile, u64)>);

/// Clients that want an answer.
const POLITE: [(ClientProfile, u64); 9] = [
    (ClientProfile::Whole, 12),
    (ClientProfile::Stream, 20),
    (ClientProfile::Chat, 10),
    (ClientProfile::Shared, 16),
    (ClientProfile::Fixed, 16),
    (ClientProfile::Image, 4),
    (ClientProfile::Tools, 2),
    (ClientProfile::Structured, 3),
    (ClientProfile::Heavy, 2),
];

/// Clients that leave early, read slowly or send harmful requests.
const HOSTILE: [(ClientProfile, u64); 12] = [
    (ClientProfile::LeavesEarly, 6),
    (ClientProfile::LeavesLate, 8),
    (ClientProfile::Slow, 4),
    (ClientProfile::Stalled, 1),
    (ClientProfile::HalfOpen, 3),
    (ClientProfile::Malformed, 4),
    (ClientProfile::Oversized, 1),
    (ClientProfile::Greedy, 2),
    (ClientProfile::TooLong, 1),
    (ClientProfile::Curious, 1),
    (ClientProfile::Giant, 1),
    (ClientProfile::Schemas, 3),
];

/// All clients generate 800 tokens, except the ones that check fixed answers.
const MARATHON: [(ClientProfile, u64); 2] = [(ClientProfile::Marathon, 15), (ClientProfile::Fixed, 1)];

impl Mix {
    /// All kinds of clients.
    pub fn all() -> Self {
        Self([&POLITE[..], &HOSTILE[..], &[(ClientProfile::Marathon, 1)]].concat())
    }

    /// Removes the clients that need a kind of request which this server does not support; none if no client is left.
    pub fn for_server(&self, golden_answers: &GoldenAnswers) -> Option<Self> {
        let known = |profile: ClientProfile| profile.needs().is_none_or(|kind| golden_answers.knows(kind));
        let left: Vec<_> = self.0.iter().copied().filter(|(profile, _)| known(*profile)).collect();
        (!left.is_empty()).then_some(Self(left))
    }

    /// Whether no client in the mix wants an answer.
    pub fn is_hostile(&self) -> bool {
        self.0.iter().all(|(profile, _)| HOSTILE.iter().any(|(hostile, _)| hostile == profile))
    }

    /// Chooses by weight.
    pub fn choose(&self, random: &mut Random) -> ClientProfile {
        let mut at = random.below(self.0.iter().map(|(_, weight)| weight).sum());
        for (profile, weight) in &self.0 {
            if at < *weight {
                return *profile;
            }
            at -= weight;
        }
        ClientProfile::Whole
    }
}

impl FromStr for Mix {
    type Err = String;

    /// `all`, `polite`, `hostile`, `marathon`, or client profiles with weights: `stream=4,giant=1`.
    fn from_str(text: &str) -> Result<Self, String> {
        let named = match text {
            "all" => return Ok(Self::all()),
            "polite" => Some(POLITE.to_vec()),
            "hostile" => Some(HOSTILE.to_vec()),
            "marathon" => Some(MARATHON.to_vec()),
            _ => None,
        };
        if let Some(mix) = named {
            return Ok(Self(mix));
        }
        let part = |part: &str| {
            let (name, weight) = part.split_once('=').unwrap_or((part, "1"));
            let profile = ClientProfile::from_str(name.trim(), true).map_err(|_| {
                let all: Vec<String> = ClientProfile::value_variants()
                    .iter()
                    .filter_map(|m| Some(m.to_possible_value()?.get_name().into()))
                    .collect();
                format!(
                    "no client is called '{name}'; there are all, polite, hostile, marathon, and {}",
                    all.join(", ")
                )
            })?;
            match weight.trim().parse() {
                Ok(weight @ 1..=1_000_000) => Ok((profile, weight)),
                _ => Err(format!("the weight of {name} is '{weight}'; 1 to 1000000 are allowed")),
            }
        };
        text.split(',').map(part).collect::<Result<_, String>>().map(Self)
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (profile, weight)) in self.0.iter().enumerate() {
            let name = profile.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
            write!(f, "{}{name}={weight}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl Serialize for Mix {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mix {
    /// As text, or as a table of client profiles and weights.
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Table(BTreeMap<String, u64>),
        }
        let text = match Written::deserialize(from)? {
            Written::Text(text) => text,
            Written::Table(table) => {
                table.iter().map(|(name, weight)| format!("{name}={weight}")).collect::<Vec<_>>().join(",")
            }
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_manner_is_chosen_about_as_often_as_its_weight_says() {
        let mix: Mix = "all".parse().unwrap();
        let mut random = Random::new(3);
        let total: u64 = mix.0.iter().map(|(_, weight)| weight).sum();
        assert_eq!(mix.0.len(), ClientProfile::value_variants().len(), "everybody is there");
        let visits = 100_000;
        let chosen: Vec<ClientProfile> = (0..visits).map(|_| mix.choose(&mut random)).collect();
        for (profile, weight) in &mix.0 {
            let share = chosen.iter().filter(|m| *m == profile).count() as f64 / visits as f64;
            let expected = *weight as f64 / total as f64;
            assert!((share - expected).abs() < 0.01, "{profile:?}: {share} instead of {expected}");
        }
    }

    #[test]
    fn mixes_are_read_and_written() {
        let mix: Mix = "stream=4, half-open".parse().unwrap();
        assert_eq!(mix.to_string(), "stream=4,half-open=1");
        assert_eq!(mix.to_string().parse::<Mix>().unwrap(), mix);
        assert!("hostile".parse::<Mix>().unwrap().is_hostile() && !mix.is_hostile());
        assert!("streem".parse::<Mix>().unwrap_err().contains("half-open"));
        assert!("stream=0".parse::<Mix>().is_err() && "".parse::<Mix>().is_err());
    }
}
