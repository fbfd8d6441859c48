//! Images that clients send: PNG files of coloured blocks that depend only on a seed.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::prompts::Random;

/// Side of a block in pixels. A block has one colour.
const BLOCK: u32 = 8;

/// A PNG of this size as a data URL.
pub fn data_url(width: u32, height: u32, seed: u64) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(png(width, height, seed)))
}

fn png(width: u32, height: u32, seed: u64) -> Vec<u8> {
    let mut pixels = Vec::with_capacity((width * height * 3) as usize);
    for y in 0..height {
        for x in 0..width {
            let block = u64::from(y / BLOCK) << 32 | u64::from(x / BLOCK);
            let colour = Random::new(seed.wrapping_mul(0x9e37_79b9).wrapping_add(block)).next();
            pixels.extend_from_slice(&colour.to_be_bytes()[..3]);
        }
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels));
    written.expect("a list of bytes takes a picture of as many pixels as it says");
    file
}

#[cfg(test)]
mod tests {
    use plimsoll_media::image::{ImageLimits, probe};

    use super::*;

    #[test]
    fn images_are_what_they_say() {
        for (width, height) in [(1, 1), (33, 70), (300, 90)] {
            let header = probe(&png(width, height, 5), &ImageLimits::default()).unwrap();
            assert_eq!((header.size.width, header.size.height), (width, height));
        }
        assert_ne!(data_url(16, 16, 1), data_url(16, 16, 2));
    }
}
