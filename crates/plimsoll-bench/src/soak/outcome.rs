//! The result of one visit.

/// The result of one visit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it should be.
    Good,
    /// A fixed question got the answer that it got when it was alone.
    Same,
    /// Refused for now, with a word on when to come back.
    Refused,
    /// The client could not reach the server, because the soak itself was in the way.
    Hindered,
    /// Not as it should be: what happened.
    Bad(String),
    /// A fixed prompt got another answer than when it was alone.
    Changed(String),
}
