//! The room of one request: every block of host memory of fixed size that its life in the engine takes, reserved where it is
//! submitted, so that lack of memory is an answer to its client and the engine thread has nothing to ask for.
//!
//! What is not in here is output that waits for its reader: its size is not known beforehand, and its owner asks for it piece
//! by piece, each time ready to be refused. What must not be in here: limits.

use plimsoll_text::StopMatcher;

use crate::api::constraint::Constraint;
use crate::api::pooling::Pool;
use crate::api::request::Request;
use crate::cache::{PAGE_TOKENS, PageId};
use crate::media::{MediaSpec, SeqMedia};
use crate::sampling::TokenCounts;

/// The blocks.
pub(crate) struct ByteReservation {
    /// Occurrences for the penalties, the prompt's already counted; empty when the request has none.
    pub counts: TokenCounts,
    /// The automata of its stop strings.
    pub stops: StopMatcher,
    /// Its pages, and their ids as the device takes them.
    pub pages: Vec<PageId>,
    pub page_ids: Vec<u32>,
    /// The form of the output, if it must have one.
    pub constraint: Option<Box<dyn Constraint>>,
    /// The text of one token.
    pub piece: String,
    /// What is collected of hidden states, if that is asked for.
    pub pool: Option<Pool>,
    /// The media in its prompt.
    pub media: SeqMedia,
}

/// Bytes of one token's text for which room is made beforehand.
const PIECE_BYTES: usize = 64;

impl ByteReservation {
    /// Reserves everything, the places of the output's ids behind the prompt's included; none without memory for it.
    pub fn reserve(request: &mut Request, spec: Option<&MediaSpec>) -> Option<Self> {
        // A block of exactly what was priced, whatever the prompt came in.
        let mut tokens = Vec::new();
        tokens.try_reserve_exact(request.prompt.len() + request.max_tokens as usize).ok()?;
        tokens.extend_from_slice(&request.prompt);
        request.prompt = tokens;
        let mut counts = TokenCounts::default();
        if request.sampling.needs_counts() {
            counts = TokenCounts::new(request.distinct_tokens_max(request.prompt.len())).ok()?;
            for id in &request.prompt {
                counts.add_prompt(*id).expect("room for every distinct token");
            }
        }
        let pages_max = (request.prompt.len() + request.max_tokens as usize).div_ceil(PAGE_TOKENS);
        let (mut pages, mut page_ids) = (Vec::new(), Vec::new());
        pages.try_reserve_exact(pages_max).ok()?;
        page_ids.try_reserve_exact(pages_max).ok()?;
        let mut piece = String::new();
        piece.try_reserve_exact(PIECE_BYTES).ok()?;
        // The strings were checked: only memory can be wanting.
        let stops = StopMatcher::new(&request.stop).ok()?.keeping(request.keep_stop);
        let pool = match request.embed {
            Some(embed) => Some(Pool::reserve(embed.size)?),
            None => None,
        };
        let media = match spec {
            Some(spec) => SeqMedia::reserve(spec, &request.prompt, &request.media, request.cache_salt).ok()?,
            None => SeqMedia::default(),
        };
        Some(Self { counts, stops, pages, page_ids, constraint: None, piece, pool, media })
    }
}
