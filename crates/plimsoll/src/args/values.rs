//! Parsers of single values.

use clap::builder::RangedU64ValueParser;
use plimsoll_memory::{Bytes, BytesError};

/// Parses a number of bytes with or without a unit, such as 20GiB. It is at most 1024 TiB, so that sums fit into 64 bits.
pub fn size(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(Bytes(bytes)) if bytes <= 1 << 50 => Ok(bytes),
        Ok(_) | Err(BytesError::TooLarge) => Err(format!("more than 1024 TiB ({} bytes)", 1_u64 << 50)),
        Err(error @ BytesError::Syntax) => Err(error.to_string()),
    }
}

/// As [`size`], but at least one byte.
pub fn some_size(text: &str) -> Result<u64, String> {
    match size(text)? {
        0 => Err("at least one byte is needed".into()),
        bytes => Ok(bytes),
    }
}

/// Parses a time in seconds, of at least `least`. At most `u32::MAX`, so that clocks can hold the current time plus this time.
pub fn seconds(least: u64) -> RangedU64ValueParser<u64> {
    RangedU64ValueParser::new().range(least..=u32::MAX.into())
}

/// Parses an address to listen on. An IPv6 address may be in brackets, as in URLs.
pub fn host(text: &str) -> Result<String, String> {
    if !text.contains(['[', ']']) {
        return Ok(text.to_owned());
    }
    let inside = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match inside.filter(|inside| inside.parse::<std::net::Ipv6Addr>().is_ok()) {
        Some(address) => Ok(address.to_owned()),
        None => {
            Err("brackets hold an IPv6 address and nothing else: give one as [::1], and the port with --port".into())
        }
    }
}
