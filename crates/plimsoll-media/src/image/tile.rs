//! A picture cut into tiles of one size, and a small copy of the whole: how InternVL sees.

use super::{Rgb, resize};
use crate::Size;

/// The tiles of a picture that is resized to `canvas`, which is made of them: from left to right and from top to bottom; of several, the
/// whole picture at the size of one tile comes last. As many as [`crate::geometry::Tiles::shape`] says.
pub fn tiles(picture: &Rgb, canvas: Size, tile: Size) -> Vec<Rgb> {
    let Size { height, width } = tile;
    let (columns, rows) = (canvas.width / width, canvas.height / height);
    let canvas = resize(picture, canvas);
    let mut cut: Vec<Rgb> = (0..rows * columns)
        .map(|nth| (nth / columns * height, nth % columns * width))
        .map(|(top, left)| {
            let row = |y: u32| &canvas.data[3 * (y * canvas.size.width + left) as usize..][..3 * width as usize];
            let mut data = Vec::with_capacity(3 * tile.pixels() as usize);
            (top..top + height).for_each(|y| data.extend_from_slice(row(y)));
            Rgb { size: tile, data }
        })
        .collect();
    if cut.len() > 1 {
        let mut whole = resize(picture, tile);
        whole.data.shrink_to_fit();
        cut.push(whole);
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{ProcessorFiles, Tiles};

    #[test]
    fn tiles_are_the_parts_of_the_picture_and_the_whole() {
        let config = r#"{"max_patches": 6, "size": {"height": 2, "width": 2}}"#;
        let rule = Tiles::new(&ProcessorFiles::read(Some(config), None, None).unwrap(), 1, 1).unwrap();
        // Two by three tiles, not resized.
        let size = Size { height: 6, width: 4 };
        let picture = Rgb { size, data: (0..72).collect() };
        let found = tiles(&picture, size, rule.tile);
        assert_eq!(found.len() as u64, rule.shape(size).unwrap().sequences);
        assert_eq!(found.len(), 7);
        for (tile, (top, left)) in found.iter().zip([(0, 0), (0, 2), (2, 0), (2, 2), (4, 0), (4, 2)]) {
            let byte = |y: u8, x: u8, c: u8| ((top + y) * 4 + left + x) * 3 + c;
            let pixel = |(y, x)| [byte(y, x, 0), byte(y, x, 1), byte(y, x, 2)];
            assert_eq!(tile.data, [(0, 0), (0, 1), (1, 0), (1, 1)].map(pixel).as_flattened());
        }
        assert_eq!(found[6], resize(&picture, rule.tile));
        // One tile is its own thumbnail.
        let one = Rgb { size: rule.tile, data: (0..12).collect() };
        assert_eq!(tiles(&one, rule.tile, rule.tile), [one]);
    }
}
