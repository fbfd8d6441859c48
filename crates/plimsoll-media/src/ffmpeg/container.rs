//! The containers that ffmpeg decodes, recognised by their first bytes.

/// A container that ffmpeg reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// MP4, M4A, QuickTime.
    Mov,
    /// Matroska, WebM.
    Matroska,
    /// AVI.
    Avi,
    /// MPEG transport stream.
    MpegTs,
    /// Ogg with Opus.
    OggOpus,
    /// AAC in ADTS frames.
    Aac,
}

/// Bytes of a packet of a transport stream, each of which begins with `0x47`.
const TS_PACKET: usize = 188;

impl Container {
    /// Returns the container of a file; none if ffmpeg does not read it.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [_, _, _, _, b'f', b't', b'y', b'p', ..] => Some(Self::Mov),
            [0x1A, 0x45, 0xDF, 0xA3, ..] => Some(Self::Matroska),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'A', b'V', b'I', b' ', ..] => Some(Self::Avi),
            [b'O', b'g', b'g', b'S', ..] => {
                let head = bytes.get(28..36);
                (head == Some(b"OpusHead")).then_some(Self::OggOpus)
            }
            // Layer 0 is no MPEG audio layer: it is AAC.
            [0xFF, second, ..] if second & 0xF6 == 0xF0 => Some(Self::Aac),
            [0x47, ..] => {
                let packets = (1..4).map(|packet| bytes.get(packet * TS_PACKET));
                packets.into_iter().all(|sync| sync == Some(&0x47)).then_some(Self::MpegTs)
            }
            _ => None,
        }
    }

    /// Returns ffmpeg's name of the one allowed demuxer, so that it never looks for a playlist or script.
    pub(super) fn demuxer(self) -> &'static str {
        match self {
            Self::Mov => "mov",
            Self::Matroska => "matroska",
            Self::Avi => "avi",
            Self::MpegTs => "mpegts",
            Self::OggOpus => "ogg",
            Self::Aac => "aac",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_tell() {
        let mut stream = vec![0_u8; 4 * TS_PACKET];
        (0..4).for_each(|packet| stream[packet * TS_PACKET] = 0x47);
        let mut opus = b"OggS".to_vec();
        opus.resize(28, 0);
        opus.extend(b"OpusHead");
        let ours: [(&[u8], _); 6] = [
            (b"\0\0\0\x20ftypisom", Container::Mov),
            (b"\x1A\x45\xDF\xA3\0", Container::Matroska),
            (b"RIFF....AVI LIST", Container::Avi),
            (&stream, Container::MpegTs),
            (&opus, Container::OggOpus),
            (b"\xFF\xF1\x50", Container::Aac),
        ];
        for (bytes, container) in ours {
            assert_eq!(Container::of(bytes), Some(container));
        }
        // An MP3, a WAV, a Vorbis file, a GIF, a playlist, a short transport stream.
        let others: [&[u8]; 7] =
            [b"", b"\xFF\xFB\x90", b"RIFF....WAVE", b"OggS", b"GIF89a", b"#EXTM3U\n", &stream[..TS_PACKET + 1]];
        for bytes in others {
            assert_eq!(Container::of(bytes), None);
        }
    }
}
