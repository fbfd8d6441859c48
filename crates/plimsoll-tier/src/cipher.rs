//! Encryption of blobs.
//!
//! - **Keys.** HKDF-SHA256 extracts a secret from the key file, with the directory's seed as salt. Each blob has a key of its own,
//!   expanded from that secret and the blob's name. A key file that is used for two directories gives them different keys.
//! - **Nonces.** AES-256-GCM takes 96 bits. Each write draws them from the system's random numbers. A key encrypts one blob, which is
//!   written a few times at most: two of 2^32 writes of one blob meet with a probability below 2^-32 (NIST SP 800-38D, 8.3).
//! - **What is authentic.** Ciphertext, name, length and version. A file under another file's name is not accepted.
//! - **Names.** Bytes 8 to 30 of a file's name are an HMAC-SHA256 of the blob's name: without the key a guessed prompt cannot be compared.
//!   The last byte, its kind, stays.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use thiserror::Error;

use crate::Name;

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Bytes of a nonce and a tag, which stand before the ciphertext.
pub(crate) const LEAD_BYTES: usize = NONCE_BYTES + 16;
const NONCE_BYTES: usize = 12;

/// Bytes of a name that belong to its owner ([`crate::Tag`]); encryption does not change them.
const TAG_BYTES: usize = 8;

/// Bytes of nonce and tag in a file.
pub(crate) const fn lead_bytes(encrypted: bool) -> usize {
    if encrypted { LEAD_BYTES } else { 0 }
}

/// The reason why a key file is refused.
#[derive(Debug, Error)]
pub enum KeyError {
    /// It cannot be read.
    #[error("read the key file {}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// Other users can read or write it.
    #[error("other users can use the key file {} (mode {mode:03o}): use chmod 600 on it", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It does not contain a key.
    #[error("the key file {} holds no key of 32 bytes or 64 hexadecimal digits: make one with `openssl rand -hex 32`", .0.display())]
    NoKey(PathBuf),
}

/// A secret key of 32 bytes.
#[derive(Clone)]
pub struct Key([u8; KEY_BYTES]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Reads a key file: 32 bytes, or 64 hexadecimal digits with or without a newline.
    ///
    /// # Errors
    /// [`KeyError`] if it cannot be read, holds no key, or other users can use it.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let failed = |error| KeyError::Io { path: path.to_owned(), error };
        let file = File::open(path).map_err(failed)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o777;
            if mode & 0o077 != 0 {
                return Err(KeyError::Exposed { path: path.to_owned(), mode });
            }
        }
        let mut bytes = Vec::new();
        file.take(2 * KEY_BYTES as u64 + 3).read_to_end(&mut bytes).map_err(failed)?;
        Self::parse(&bytes).ok_or_else(|| KeyError::NoKey(path.to_owned()))
    }

    /// A key from the bytes of a key file.
    fn parse(bytes: &[u8]) -> Option<Self> {
        if let Ok(key) = bytes.try_into() {
            return Some(Self(key));
        }
        let digits = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        let digits = digits.strip_suffix(b"\r").unwrap_or(digits);
        if digits.len() != 2 * KEY_BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let mut key = [0; KEY_BYTES];
        for (byte, two) in key.iter_mut().zip(digits.chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()?;
        }
        Some(Self(key))
    }
}

/// The encryption of one directory.
pub(crate) struct Cipher {
    secret: Prk,
    names: hmac::Key,
    random: SystemRandom,
}

impl Cipher {
    /// `seed` is the directory's random bytes.
    pub fn new(key: &Key, seed: &[u8; 32]) -> Self {
        let secret = Salt::new(HKDF_SHA256, seed).extract(&key.0);
        let names = hmac::Key::new(hmac::HMAC_SHA256, &expand(&secret, &[b"plimsoll names"]));
        Self { secret, names, random: SystemRandom::new() }
    }

    /// Returns a mark that shows whether a directory was made with this key.
    pub fn mark(&self) -> [u8; 32] {
        expand(&self.secret, &[b"plimsoll mark"])
    }

    /// The name of a blob's file.
    pub fn name(&self, name: &Name) -> Name {
        let (mut stored, mac) = (*name, hmac::sign(&self.names, name));
        let keyed = &mut stored[TAG_BYTES..31];
        keyed.copy_from_slice(&mac.as_ref()[..keyed.len()]);
        stored
    }

    fn key(&self, name: &Name) -> LessSafeKey {
        let key = expand(&self.secret, &[b"plimsoll blob", name]);
        LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key).expect("a key of 32 bytes"))
    }

    /// Encrypts a payload in place. Returns nonce and tag; `None` if the system has no random numbers, or the cipher refuses the length.
    pub fn seal(&self, name: &Name, about: &[u8], payload: &mut [u8]) -> Option<[u8; LEAD_BYTES]> {
        let mut lead = [0; LEAD_BYTES];
        let (nonce, tag) = lead.split_at_mut(NONCE_BYTES);
        self.random.fill(nonce).ok()?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let sealed = self.key(name).seal_in_place_separate_tag(nonce, Aad::from(about), payload).ok()?;
        tag.copy_from_slice(sealed.as_ref());
        Some(lead)
    }

    /// Decrypts a payload in place. Returns false if it is not authentic; the payload is then unspecified.
    pub fn open(&self, name: &Name, about: &[u8], lead: &[u8; LEAD_BYTES], payload: &mut [u8]) -> bool {
        let (nonce, tag) = lead.split_at(NONCE_BYTES);
        let (Ok(nonce), Ok(tag)) = (Nonce::try_assume_unique_for_key(nonce), tag.try_into()) else { return false };
        self.key(name).open_in_place_separate_tag(nonce, Aad::from(about), tag, payload, 0..).is_ok()
    }
}

fn expand(secret: &Prk, info: &[&[u8]]) -> [u8; 32] {
    let mut bytes = [0; 32];
    let expanded = secret.expand(info, HKDF_SHA256).and_then(|okm| okm.fill(&mut bytes));
    expanded.expect("32 bytes are less than HKDF's most");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_refused_and_names_say_nothing() {
        let key = Key::parse(&[5; 32]).unwrap();
        let (cipher, name, about) = (Cipher::new(&key, &[1; 32]), [7; 32], [9; 56]);
        let mut sealed = *b"what was said";
        let lead = cipher.seal(&name, &about, &mut sealed).unwrap();
        assert_ne!(&sealed, b"what was said");
        let open = |cipher: &Cipher, name: Name, about: [u8; 56], lead, mut payload: [u8; 13]| {
            cipher.open(&name, &about, &lead, &mut payload).then_some(payload)
        };
        assert_eq!(open(&cipher, name, about, lead, sealed), Some(*b"what was said"));
        for bit in 0..13 * 8 {
            let mut flipped = sealed;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&cipher, name, about, lead, flipped), None);
        }
        for bit in 0..LEAD_BYTES * 8 {
            let mut flipped = lead;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&cipher, name, about, flipped, sealed), None);
        }
        let mut other = about;
        other[20] ^= 1;
        assert_eq!(open(&cipher, name, other, lead, sealed), None);
        assert_eq!(open(&cipher, [8; 32], about, lead, sealed), None, "under another name");
        for other in [Cipher::new(&key, &[2; 32]), Cipher::new(&Key::parse(&[6; 32]).unwrap(), &[1; 32])] {
            assert_eq!(open(&other, name, about, lead, sealed), None, "another directory, another key");
            assert!(other.mark() != cipher.mark() && other.name(&name)[8..31] != cipher.name(&name)[8..31]);
        }
        let stored = cipher.name(&name);
        assert!(stored[..8] == name[..8] && stored[31] == name[31], "owner and kind");
        assert!(stored[8..31].iter().zip(&name[8..31]).any(|(a, b)| a != b));
        let again = cipher.seal(&name, &about, &mut { *b"what was said" }).unwrap();
        assert_ne!(again, lead, "no nonce is used twice");
    }

    #[test]
    fn a_key_file_is_32_bytes_or_their_digits_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let hex = "00112233445566778899aabbccddeeff".repeat(2);
        for (bytes, good) in [
            (vec![1; 32], true),
            (hex.clone().into_bytes(), true),
            (format!("{hex}\n").into_bytes(), true),
            (format!("{hex}\r\n").into_bytes(), true),
            (format!("{hex}0\n").into_bytes(), false),
            (vec![1; 31], false),
            (vec![1; 33], false),
            (Vec::new(), false),
            (vec![b'x'; 64], false),
        ] {
            std::fs::write(&path, bytes).unwrap();
            #[cfg(unix)]
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
            let read = Key::read(&path);
            assert!(read.is_ok() == good, "{read:?}");
            assert!(good || read.unwrap_err().to_string().contains("openssl rand -hex 32"));
        }
        #[cfg(unix)]
        {
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
            let error = Key::read(&path).unwrap_err();
            assert!(matches!(error, KeyError::Exposed { mode: 0o640, .. }), "{error}");
        }
        assert!(matches!(Key::read(&dir.path().join("none")), Err(KeyError::Io { .. })));
    }
}
