//! State shared by all requests with media: limits, the queues for fetching and decoding, the memory of decoders.

pub(crate) mod config;
pub(crate) mod decode_memory;
pub(crate) mod fetch_queue;
pub(crate) mod pipeline;
