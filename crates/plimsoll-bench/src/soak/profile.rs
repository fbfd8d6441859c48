//! The client profiles: how clients behave.

use serde::Serialize;

use super::question::Kind;

/// A client's behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ClientProfile {
    /// Waits for a whole answer.
    Whole,
    /// Reads a stream to its end.
    Stream,
    /// The same through chat.
    Chat,
    /// Asks with a long beginning that others share.
    Shared,
    /// Asks a fixed question of any kind and compares.
    Fixed,
    /// Asks about an image.
    Image,
    /// Must be answered with a tool's call.
    Tools,
    /// Asks for an answer in a given form.
    Structured,
    /// Reads a stream of eight hundred tokens to its end.
    Marathon,
    /// Asks for several answers with all the log-probabilities there are, the prompt's too.
    Heavy,
    /// Leaves before the first byte: in the queue, in the prefill.
    LeavesEarly,
    /// Leaves in the middle of a stream.
    LeavesLate,
    /// Reads, but slowly.
    Slow,
    /// Asks for much and then reads nothing for longer than any server should wait.
    Stalled,
    /// Sends half a request and waits.
    HalfOpen,
    /// Sends what is no request.
    Malformed,
    /// Announces ten gigabytes.
    Oversized,
    /// Asks for a hundred thousand answers.
    Greedy,
    /// Asks for more than any context holds.
    TooLong,
    /// Asks for a million log-probabilities.
    Curious,
    /// Sends as much JSON as any server takes, in the shape that costs most to read.
    Giant,
    /// Sends a schema, odd or hostile, and validates the answer.
    Schemas,
}

impl ClientProfile {
    /// The kind of requests that the server must know for this client profile to make sense.
    pub const fn needs(self) -> Option<Kind> {
        match self {
            Self::Chat => Some(Kind::Chat),
            Self::Image => Some(Kind::Image),
            Self::Tools => Some(Kind::Tools),
            Self::Structured | Self::Schemas => Some(Kind::Structured),
            _ => None,
        }
    }
}
