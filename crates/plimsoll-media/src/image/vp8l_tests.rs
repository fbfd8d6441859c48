//! Streams of libwebp's encoder are read to the end of their codes; broken streams are refused.

use std::path::PathBuf;

use super::{GROUPS_MAX, Groups, Walk};
use crate::{MediaError, Size};

fn tree_bytes(stream: &[u8], size: Option<Size>) -> Result<u64, MediaError> {
    super::tree_bytes(stream, size, &mut GROUPS_MAX.clone())
}

/// Returns the body of the first chunk of this kind.
fn body(file: &str, kind: &[u8; 4]) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/media");
    let bytes = std::fs::read(folder.join(file)).unwrap();
    let at = bytes.windows(4).position(|four| four == kind).unwrap();
    let length = u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
    bytes[at + 8..at + 8 + length].to_vec()
}

/// Returns the bitstreams: name, bytes, and the size if it is not in them.
fn streams() -> Vec<(&'static str, Vec<u8>, Option<Size>)> {
    let mut all: Vec<_> = ["blocks.webp", "blocks_palette.webp", "turned.webp", "moving.webp"]
        .map(|file| (file, body(file, b"VP8L"), None))
        .into();
    all.push(("blocks_alpha.webp", body("blocks_alpha.webp", b"ALPH")[1..].to_vec(), Some(Size::new(32, 64))));
    all
}

#[test]
fn groups_are_counted_behind_all_that_comes_before_them() {
    let mut most = (0, 0);
    for (name, stream, size) in streams() {
        let Groups { count, blocks, cached } = Walk::new(&stream).groups(size).unwrap();
        println!(
            "{name}: {count} groups for {blocks} blocks, a cache of {cached}, {:?} bytes",
            tree_bytes(&stream, size)
        );
        assert!(count <= blocks, "{name}");
        // At least three trees of two symbols, and not much more than the longest codes take.
        let bytes = tree_bytes(&stream, size).unwrap();
        assert!(bytes < count * 40_000, "{name}: {bytes} bytes for {count} groups");
        most = (count.max(most.0), cached.max(most.1));
    }
    assert!(most.0 > 1 && most.1 > 0, "some have several groups, some a cache: {most:?}");
}

#[test]
fn what_is_cut_off_before_its_pixels_is_refused() {
    for (name, stream, size) in streams() {
        let mut walk = Walk::new(&stream);
        let groups = walk.groups(size).unwrap();
        (0..groups.count).for_each(|_| walk.codes(groups.cached).unwrap());
        let end = walk.bits.at.div_ceil(8);
        assert!(end <= stream.len(), "{name}");
        for length in 0..end {
            let words = tree_bytes(&stream[..length], size).unwrap_err().to_string();
            assert_eq!(words, "an image cannot be read: its lossless bitstream is broken or cut off", "{name}");
        }
        assert!(tree_bytes(&stream[..end], size).is_ok(), "{name}: {end} bytes are enough");
    }
}

#[test]
fn codes_that_leave_room_or_have_none_are_refused() {
    let mut code = super::Code::new();
    assert_eq!(code.set(&[0, 0]), None, "no symbol");
    assert_eq!(code.set(&[1, 2]), None, "room is left");
    assert_eq!(code.set(&[1, 1, 1]), None, "more than there is room for");
    assert_eq!(code.set(&[1; 4]), None, "twice as many as there is room for, which the decoder's sixteen bits miss");
    assert_eq!((code.set(&[0, 7, 0]), code.symbols[0], code.tree_bytes()), (Some(()), 1, 0), "one alone");
    assert_eq!((code.set_equal(3, 8), code.set_equal(3, 7), code.set_equal(3, 9)), (Some(()), None, None));
    assert_eq!((code.set(&[2, 1, 2]), &code.symbols[..3]), (Some(()), &[1, 0, 2][..]), "short ones first");
}
