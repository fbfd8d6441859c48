//! Files attached to a message: images as data URLs, texts unchanged.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use plimsoll_memory::Bytes;
use serde_json::{Value, json};

/// Most bytes of an image file.
const IMAGE_BYTES_MAX: u64 = 16 << 20;

/// Most bytes of a text file.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// The first bytes of the image formats that servers take, and their media types.
const MAGIC: [(&[u8], &str); 4] = [
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
];

/// Reads a file of at most `most` bytes.
///
/// # Errors
/// The path cannot be read, is a directory, or has more than `most` bytes.
pub fn read_bounded(path: &Path, most: u64) -> anyhow::Result<Vec<u8>> {
    let name = || path.display().to_string();
    if path.is_dir() {
        bail!("{} is a directory: name a file", name());
    }
    let file = File::open(path).with_context(name)?;
    let bytes = file.metadata().with_context(name)?.len();
    let too_large = |bytes| format!("{} has {}, at most {} are taken", name(), Bytes(bytes), Bytes(most));
    if bytes > most {
        bail!(too_large(bytes));
    }
    let mut content = Vec::new();
    file.take(most + 1).read_to_end(&mut content).with_context(name)?;
    match content.len() as u64 {
        read if read > most => bail!(too_large(read)),
        _ => Ok(content),
    }
}

/// Reads an image file as a part of a message.
///
/// # Errors
/// As [`read_bounded`], or the file is not a PNG, JPEG, GIF or WebP.
pub fn image(path: &Path) -> anyhow::Result<Value> {
    let content = read_bounded(path, IMAGE_BYTES_MAX)?;
    let kind = MAGIC.iter().find(|(magic, _)| content.starts_with(magic));
    let (_, kind) = kind.with_context(|| format!("{} is not a PNG, JPEG, GIF or WebP", path.display()))?;
    Ok(json!({"type": "image_url", "image_url": {"url": format!("data:{kind};base64,{}", STANDARD.encode(content))}}))
}

/// Reads a text file as a part of a message, with its name.
///
/// # Errors
/// As [`read_bounded`], or the file is not UTF-8.
pub fn text(path: &Path) -> anyhow::Result<Value> {
    let content = read_bounded(path, TEXT_BYTES_MAX)?;
    let text = String::from_utf8(content).ok();
    let text = text.with_context(|| format!("{} is not UTF-8 text; /image takes images", path.display()))?;
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Ok(json!({"type": "text", "text": format!("{name}:\n\n{text}\n")}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_within_their_limits() {
        let folder = std::env::temp_dir().join(format!("plimsoll-attach-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let png = write("a.png", b"\x89PNG\r\n\x1a\nrest");
        let part = image(&png).unwrap();
        assert!(part["image_url"]["url"].as_str().unwrap().starts_with("data:image/png;base64,iVBORw0KGgpy"));
        assert!(text(&png).unwrap_err().to_string().contains("/image"));
        let note = write("note.txt", "Tide: 3 m".as_bytes());
        assert_eq!(text(&note).unwrap()["text"], "note.txt:\n\nTide: 3 m\n");
        assert!(image(&note).unwrap_err().to_string().contains("not a PNG"));
        let long = write("long.txt", &vec![b'x'; TEXT_BYTES_MAX as usize + 1]);
        assert!(text(&long).unwrap_err().to_string().contains("at most 1.0 MiB"));
        assert!(text(&folder).unwrap_err().to_string().contains("is a directory"));
        assert!(format!("{:#}", text(&folder.join("absent")).unwrap_err()).contains("absent"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
