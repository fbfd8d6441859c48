//! The client's trace context: the `traceparent` header of W3C Trace Context.

use axum::http::HeaderMap;

/// The contents of a `traceparent` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    pub sampled: bool,
}

impl Parent {
    /// Reads the parent of a request. An invalid header counts as none, as the standard says.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut all = headers.get_all("traceparent").iter();
        let (value, None) = (all.next()?, all.next()) else { return None };
        Self::parse(value.to_str().ok()?)
    }

    /// Parses `version-trace-parent-flags`. Later versions may append fields; `00` may not.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('-');
        let version = parts.next().filter(|version| is_hex(version, 2) && *version != "ff")?;
        let trace = parts.next().filter(|trace| is_hex(trace, 32))?;
        let span = parts.next().filter(|span| is_hex(span, 16))?;
        let flags = parts.next().filter(|flags| is_hex(flags, 2))?;
        if version == "00" && parts.next().is_some() {
            return None;
        }
        let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| *trace != 0)?;
        let span = u64::from_str_radix(span, 16).ok().filter(|span| *span != 0)?;
        let flags = u8::from_str_radix(flags, 16).ok()?;
        Some(Self { trace_id: trace.to_be_bytes(), span_id: span.to_be_bytes(), sampled: flags & 1 == 1 })
    }
}

/// Returns whether this is lower-case hexadecimal of this length.
fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

    #[test]
    fn a_valid_header_names_trace_parent_and_flag() {
        let parent = Parent::parse(&format!("00-{TRACE}-b7ad6b7169203331-01")).unwrap();
        assert_eq!(parent.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128.to_be_bytes());
        assert_eq!((parent.span_id, parent.sampled), (0xb7ad_6b71_6920_3331_u64.to_be_bytes(), true));
        assert!(!Parent::parse(&format!("00-{TRACE}-b7ad6b7169203331-02")).unwrap().sampled);
        assert!(Parent::parse(&format!("01-{TRACE}-b7ad6b7169203331-01-more")).is_some(), "a later version");
    }

    #[test]
    fn an_invalid_header_counts_as_none() {
        for bad in [
            String::new(),
            "00".into(),
            format!("00-{TRACE}-b7ad6b7169203331"),
            format!("00-{TRACE}-b7ad6b7169203331-01-more"),
            format!("ff-{TRACE}-b7ad6b7169203331-01"),
            format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("00-{}-b7ad6b7169203331-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-b7ad6b716920333é-01"),
            format!("00-+{}-b7ad6b7169203331-01", &TRACE[1..]),
            "-".repeat(30_000),
        ] {
            assert_eq!(Parent::parse(&bad), None, "{bad}");
        }
    }
}
