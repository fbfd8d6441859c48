//! All fixed-size host buffers of one request, allocated in `submit`. If one fails, the client gets a 503. The engine
//! thread never allocates them.
//!
//! Not here: unread output, which the outbox grows, and limits.

use plimsoll_text::StopMatcher;

use crate::api::constraint::Constraint;
use crate::api::pooling::Pool;
use crate::api::request::Request;
use crate::cache::{PAGE_TOKENS, PageId};
use crate::media::{MediaSpec, SeqMedia};
use crate::sampling::TokenCounts;

/// The fixed-size host buffers of one request.
pub(crate) struct ByteReservation {
    /// Occurrences for the penalties, the prompt's already counted; empty when the request has none.
    pub counts: TokenCounts,
    /// The automata of its stop strings.
    pub stops: StopMatcher,
    /// Its pages, and its window pages, for models with sliding windows.
    pub pages: Vec<PageId>,
    pub window_pages: Vec<PageId>,
    /// The grammar of the output; none if it is free.
    pub constraint: Option<Box<dyn Constraint>>,
    /// The text of one token.
    pub piece: String,
    /// Collected hidden states, for an embedding or a score.
    pub pool: Option<Pool>,
    /// The media in its prompt.
    pub media: SeqMedia,
}

/// Bytes reserved for the text of one token.
const PIECE_BYTES: usize = 64;

impl ByteReservation {
    /// Allocates all buffers. The prompt's list gets room for the output's ids. None if memory is short.
    pub fn reserve(request: &mut Request, spec: Option<&MediaSpec>) -> Option<Self> {
        // A block of exactly the reserved size, whatever capacity the prompt came with.
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
        let (mut pages, mut window_pages) = (Vec::new(), Vec::new());
        pages.try_reserve_exact(pages_max).ok()?;
        window_pages.try_reserve_exact(pages_max).ok()?;
        let mut piece = String::new();
        piece.try_reserve_exact(PIECE_BYTES).ok()?;
        // The strings were checked: only memory can be short.
        let stops = StopMatcher::new(&request.stop).ok()?.keeping(request.keep_stop);
        let pool = match request.embed {
            Some(embed) => Some(Pool::reserve(embed.size)?),
            None => None,
        };
        let media = match spec {
            Some(spec) => SeqMedia::reserve(spec, &request.prompt, &request.media, request.cache_salt).ok()?,
            None => SeqMedia::default(),
        };
        Some(Self { counts, stops, pages, window_pages, constraint: None, piece, pool, media })
    }
}
