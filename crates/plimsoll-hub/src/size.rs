//! Sizes for display.

/// Returns a size for display: decimal units, one digit after the point.
pub(crate) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1_000 {
        return format!("{bytes} bytes");
    }
    let mut tenths = bytes / 100;
    let mut unit = 0;
    while tenths >= 10_000 && unit + 1 < UNITS.len() {
        tenths /= 1_000;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(human_bytes(999), "999 bytes");
        assert_eq!(human_bytes(1_000), "1.0 kB");
        assert_eq!(human_bytes(98_362_432), "98.3 MB");
        assert_eq!(human_bytes(1_234_000_000), "1.2 GB");
        assert_eq!(human_bytes(u64::MAX), "18446744.0 TB");
    }
}
