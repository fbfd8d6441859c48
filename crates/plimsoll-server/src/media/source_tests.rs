use super::*;

fn from_base64(data: &str, limit: u64) -> Result<Vec<u8>, String> {
    decoded("p", "image/png", data, Modality::Image, (limit, "--max-image-bytes")).map_err(|error| error.message)
}

#[test]
fn base64_is_decoded_once_and_never_beyond_the_limit() {
    for (data, bytes) in [
        ("", &b""[..]),
        ("YQ==", b"a"),
        ("YQ", b"a"),
        ("YWI=", b"ab"),
        ("YWJj", b"abc"),
        ("+/8=", &[0xfb, 0xff]),
        ("YWJj\n", b"abc"),
        (" Y\r\nWI =\n", b"ab"),
        ("YWJj\tYWJj", b"abcabc"),
    ] {
        assert_eq!(from_base64(data, 10).as_deref(), Ok(bytes), "{data}");
    }
    for bad in ["Y", "Y\n", "YWJj\n!", "-_8=", "a b", "YQ==YQ==", "ä"] {
        assert!(from_base64(bad, 10).unwrap_err().contains("this is not base64"), "{bad}");
    }
    assert!(from_base64(&"AAAA".repeat(4), 10).is_ok(), "what is near the limit is seen when it is probed");
    assert!(from_base64(&"AAAA\n".repeat(4), 10).is_ok(), "line breaks are no bytes of it");
    let error = from_base64(&"AAAA".repeat(5), 10).unwrap_err();
    assert!(error.contains("limit is 10 (--max-image-bytes)"), "{error}");
    for (media_type, kind, known) in [
        ("image/svg+xml", Modality::Image, "GIF and WebP"),
        ("video/x-flv", Modality::Video, "GIF and WebP"),
        ("image/heic", Modality::Image, "GIF and WebP"),
        ("audio/midi", Modality::Audio, "WAV, FLAC, MP3 and Ogg Vorbis"),
        ("image/png", Modality::Audio, "WAV, FLAC, MP3 and Ogg Vorbis"),
    ] {
        let error = decoded("p", media_type, "", kind, (10, "--max-audio-bytes")).unwrap_err().message;
        assert!(error.contains(media_type) && error.contains(known), "{error}");
    }
}

#[test]
fn file_urls_are_paths() {
    let roots = [PathBuf::from("/")];
    let path = |url: &str| local("p", url, &roots).map_err(|error| error.message);
    assert_eq!(path("file:///a/b%20c%C3%A9.png"), Ok(PathBuf::from("/a/b cé.png")));
    assert_eq!(path("FILE://localhost/a"), Ok(PathBuf::from("/a")));
    for bad in [
        "file:",
        "file:a",
        "file://",
        "file://host/a",
        "file:/a",
        "file:///a%",
        "file:///a%2",
        "file:///a%ff",
        "file:///a%00b",
    ] {
        assert!(path(bad).is_err(), "{bad}");
    }
    assert!(local("p", "file:///a", &[]).unwrap_err().message.contains("--media-root"));
}

#[cfg(unix)]
#[test]
fn files_come_from_under_a_root_and_from_nowhere_else() {
    use std::os::unix::fs::symlink;
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir_all(at("root/deep")).unwrap();
    fs::create_dir_all(at("rooted")).unwrap();
    fs::write(at("root/deep/a.png"), b"inside").unwrap();
    fs::write(at("rooted/b.png"), b"beside").unwrap();
    fs::write(at("secret"), b"outside").unwrap();
    symlink(at("secret"), at("root/link")).unwrap();
    symlink(at("root/deep/a.png"), at("root/inner")).unwrap();
    symlink(directory.path(), at("root/up")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(at("root/pipe")).status().unwrap();
    assert!(made.success());
    let roots = [at("root")];
    let read = |name: &str| {
        let (mut file, bytes) = open(&at(name), &roots)?;
        let mut text = String::new();
        file.read_to_string(&mut text).ok()?;
        assert_eq!(text.len() as u64, bytes);
        Some(text)
    };
    for inside in ["root/deep/a.png", "root/inner", "root/deep/../deep/a.png"] {
        assert_eq!(read(inside).as_deref(), Some("inside"), "{inside}");
    }
    for outside in [
        "secret",
        "root/link",
        "root/up/secret",
        "root/../secret",
        "rooted/b.png",
        "root/pipe",
        "root/deep",
        "root/none",
    ] {
        assert_eq!(read(outside), None, "{outside}");
    }
}
