//! Stores with a key, and saved names.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;

use plimsoll_tier::{Access, Key, Limits, Miss, NAMES_MAX, OpenError, Put, SaveError, Store, System, saved_id};

use crate::common::{LIMITS, blob, name, read};

fn key(byte: u8) -> Key {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, [byte; 32]).unwrap();
    #[cfg(unix)]
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    Key::read(&path).unwrap()
}

/// Returns the only file of a directory with one blob.
fn the_file(dir: &Path) -> PathBuf {
    let shards = std::fs::read_dir(dir.join("blobs")).unwrap().map(|shard| shard.unwrap().path());
    let mut files = shards.flat_map(|shard| std::fs::read_dir(shard).unwrap()).map(|file| file.unwrap().path());
    let file = files.next().unwrap();
    assert!(files.next().is_none());
    file
}

#[test]
fn encrypted_blobs_are_read_with_their_key_alone() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, one, other) = (temp.path().join("cache"), key(1), key(2));
    let open = |access| Store::open_with(&dir, LIMITS, Box::new(System), access);
    let store = open(Access::Key(&one)).unwrap();
    assert_eq!((store.put(&name(6), &blob(6)), store.put(&name(6), &blob(6))), (Put::Written, Put::Known));
    assert_eq!(read(&store, 6), None);
    drop(store);
    let file = the_file(&dir);
    let bytes = std::fs::read(&file).unwrap();
    assert!(!bytes.windows(16).any(|part| blob(6).windows(16).any(|said| said == part)), "nothing of it is readable");
    let own: String = name(6).iter().map(|byte| format!("{byte:02x}")).collect();
    let stored = file.file_name().unwrap().to_str().unwrap().to_owned();
    assert!(stored[..16] == own[..16] && stored[16..62] != own[16..62], "a name is keyed: {stored}");
    assert_eq!(stored[62..], own[62..], "the kind");
    for (access, what) in [(Access::Plain, "--cache-key-file"), (Access::Key(&other), "another key")] {
        let error = open(access).err().unwrap().to_string();
        assert!(error.contains(what) && error.contains("plimsoll cache rm"), "{error}");
    }
    assert_eq!(std::fs::read(&file).unwrap(), bytes, "a refused directory is left as it is");
    // Upkeep needs no key for checksums, lengths and names.
    let upkeep = open(Access::Upkeep).unwrap();
    let checked = upkeep.verify();
    assert_eq!((checked.whole, checked.closed, checked.damaged), (1, 1, 0));
    drop(upkeep);
    let store = open(Access::Key(&one)).unwrap();
    assert_eq!((read(&store, 6), store.verify().closed), (None, 0));
}

#[test]
fn a_directory_without_blobs_takes_any_key() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, one, other) = (temp.path().join("cache"), key(1), key(2));
    let open = |access| Store::open_with(&dir, LIMITS, Box::new(System), access);
    for access in [Access::Plain, Access::Key(&one), Access::Key(&other), Access::Plain, Access::Key(&one)] {
        let store = open(access).unwrap();
        assert_eq!((store.put(&name(1), &blob(1)), read(&store, 1)), (Put::Written, None), "{access:?}");
        store.clear(None);
    }
    let store = open(Access::Plain).unwrap();
    store.put(&name(1), &blob(1));
    drop(store);
    let error = open(Access::Key(&one)).err().unwrap();
    assert!(matches!(error, OpenError::OtherKey { how: "not encrypted", .. }), "{error}");
}

#[test]
fn a_changed_encrypted_file_is_a_miss() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, key) = (temp.path().join("cache"), key(1));
    let open = || Store::open_with(&dir, LIMITS, Box::new(System), Access::Key(&key)).unwrap();
    for at in [0, 9, 17, 30, 60, 75, 80, 91, 92, 107, 108, 3000, 3107] {
        let store = open();
        store.put(&name(0), &blob(0));
        let file = the_file(&dir);
        let mut bytes = std::fs::read(&file).unwrap();
        assert_eq!(bytes.len(), 80 + 28 + 3000);
        bytes[at] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(read(&store, 0), Some(Miss::Damaged), "byte {at}");
    }
}

#[test]
fn a_saved_name_pins_its_blobs_over_restarts() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, key) = (temp.path().join("cache"), key(1));
    for access in [Access::Plain, Access::Key(&key)] {
        let limits = Limits { bytes: 24 * 4096, entries: 24, write_bytes_per_day: None };
        let open = |access| Store::open_with(&dir, limits, Box::new(System), access).unwrap();
        let store = open(access);
        let tag = [0; 8];
        for n in [0, 3, 6] {
            store.put(&name(n), &blob(n));
        }
        store.save_name(&tag, "a secret label", b"said".to_vec(), vec![name(0), name(3)]).unwrap();
        store.save_name(&tag, "another", vec![1; 3], vec![name(3)]).unwrap();
        let flood = |store: &Store| (20..80).for_each(|n| _ = store.put(&name(n * 3), &blob(n * 3)));
        flood(&store);
        assert_eq!([0, 3, 6].map(|n| store.contains(&name(n))), [true, true, false], "{access:?}");
        drop(store);
        let files = std::fs::read_dir(dir.join("names")).unwrap().map(|file| file.unwrap().path());
        let readable = files.filter(|file| std::fs::read(file).unwrap().windows(6).any(|part| part == b"secret"));
        assert_eq!(readable.count(), usize::from(matches!(access, Access::Plain)));
        let labels = Store::list_saved(&dir, &System).into_iter().map(|saved| saved.label).collect::<Vec<_>>();
        let plain = [Some("a secret label".to_owned()), Some("another".to_owned())];
        assert_eq!(labels, if matches!(access, Access::Plain) { plain } else { [None, None] });
        let upkeep = open(Access::Upkeep);
        let known = upkeep.saved().iter().filter(|saved| saved.label.is_some()).count();
        assert_eq!((upkeep.saved().len(), known), (2, if matches!(access, Access::Plain) { 2 } else { 0 }));
        drop(upkeep);
        let store = open(access);
        assert_eq!(store.load_name(&tag, "a secret label").as_deref(), Some(&b"said"[..]));
        assert_eq!((store.load_name(&tag, "none"), store.load_name(&[1; 8], "another")), (None, None));
        flood(&store);
        assert_eq!([0, 3].map(|n| read(&store, n)), [None, None], "they are pinned after a restart, too");
        assert!(store.remove_name(&tag, "a secret label") && !store.remove_name(&tag, "a secret label"));
        (80..85).for_each(|n| _ = store.put(&name(n * 3), &blob(n * 3)));
        flood(&store);
        assert_eq!([0, 3].map(|n| store.contains(&name(n))), [false, true], "another name has it");
        store.clear(None);
        assert!(store.saved().is_empty() && store.load_name(&tag, "another").is_none());
        assert_eq!(store.counts().bytes.load(SeqCst), 0);
    }
}

#[test]
fn a_name_that_is_saved_again_unpins_what_it_had() {
    let temp = tempfile::tempdir().unwrap();
    let limits = Limits { bytes: 24 * 4096, entries: 24, write_bytes_per_day: None };
    let store = Store::open(&temp.path().join("cache"), limits, Box::new(System)).unwrap();
    let (tag, pinned) = ([0; 8], || store.counts().pinned_bytes.load(SeqCst) / 4096);
    for n in [0, 3, 6, 9] {
        store.put(&name(n), &blob(n));
    }
    let save = |label: &str, blobs: &[u8]| {
        let blobs = blobs.iter().map(|n| name(*n)).collect();
        store.save_name(&tag, label, Vec::new(), blobs).unwrap();
    };
    save("agent", &[0, 3]);
    save("other", &[3, 6]);
    assert_eq!(pinned(), 3);
    save("agent", &[9]);
    assert_eq!(pinned(), 3, "another name has blob 3, none has blob 0");
    (20..80).for_each(|n| _ = store.put(&name(n * 3), &blob(n * 3)));
    assert_eq!([0, 3, 6, 9].map(|n| store.contains(&name(n))), [false, true, true, true]);
    // A blob that is written late is pinned only for a name that still exists.
    let [agent, other] = [[name(9)], [name(6)]].map(|blobs| saved_id(&blobs).unwrap());
    assert!(store.remove_name(&tag, "agent") && !store.pin_saved_blob(&name(9), agent));
    assert!(store.pin_saved_blob(&name(9), other));
    assert_eq!((pinned(), store.pinned_bytes_beside(&tag, "other", &[name(3)]) / 4096), (3, 2));
    save("other", &[]);
    assert_eq!(pinned(), 1);
}

#[test]
fn names_are_bounded_and_a_damaged_one_is_removed() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let limits = Limits { bytes: 1 << 20, entries: 64, write_bytes_per_day: None };
    let open = || Store::open(&dir, limits, Box::new(System)).unwrap();
    let store = open();
    for n in 0..NAMES_MAX {
        store.save_name(&[0; 8], &n.to_string(), vec![0; 10], Vec::new()).unwrap();
    }
    let full = store.save_name(&[0; 8], "more", Vec::new(), Vec::new()).unwrap_err();
    assert!(matches!(full, SaveError::Full), "{full}");
    store.save_name(&[0; 8], "5", vec![7; 2 << 20], Vec::new()).unwrap_err();
    store.save_name(&[0; 8], "5", vec![7; 20], Vec::new()).unwrap();
    assert_eq!((store.saved().len(), store.load_name(&[0; 8], "5")), (NAMES_MAX, Some(vec![7; 20])));
    drop(store);
    for file in std::fs::read_dir(dir.join("names")).unwrap() {
        let path = file.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let store = open();
    assert!(store.saved().is_empty() && store.load_name(&[0; 8], "5").is_none());
    assert_eq!(std::fs::read_dir(dir.join("names")).unwrap().count(), 0);
}
