//! The result of one visit.

/// The result of one visit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The right answer.
    Good,
    /// A fixed question got the answer that was recorded while the server was idle.
    Same,
    /// Refused for now, with a time to retry.
    Refused,
    /// The client could not reach the server, because the soak itself was in the way.
    Hindered,
    /// A wrong answer or an error, with its description.
    Bad(String),
    /// A fixed question got another answer than the recorded one.
    Changed(String),
}
