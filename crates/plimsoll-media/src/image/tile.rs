//! A picture cut into tiles of one size, and a small copy of the whole: how InternVL sees.

use super::{Rgb, resize};
use crate::geometry::Tiles;
use crate::{MediaError, Size};

/// The tiles of a picture, resized to fill their grid: from left to right and from top to bottom; of several, the whole picture at the
/// size of one tile comes last. As many as [`Tiles::shape`] says.
pub fn tiles(picture: &Rgb, rule: &Tiles) -> Result<Vec<Rgb>, MediaError> {
    let (columns, rows) = rule.grid(picture.size)?;
    let (columns, rows) = (columns as u32, rows as u32);
    let Size { height, width } = rule.tile;
    let canvas = resize(picture, Size { height: height * rows, width: width * columns });
    let mut cut: Vec<Rgb> = (0..rows * columns)
        .map(|tile| (tile / columns * height, tile % columns * width))
        .map(|(top, left)| {
            let row = |y: u32| &canvas.data[3 * (y * canvas.size.width + left) as usize..][..3 * width as usize];
            Rgb { size: rule.tile, data: (top..top + height).flat_map(row).copied().collect() }
        })
        .collect();
    if cut.len() > 1 {
        cut.push(resize(picture, rule.tile));
    }
    Ok(cut)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::ProcessorFiles;

    #[test]
    fn tiles_are_the_parts_of_the_picture_and_the_whole() {
        let config = r#"{"crop_to_patches": true, "max_patches": 6, "size": {"height": 2, "width": 2}}"#;
        let rule = Tiles::new(&ProcessorFiles::read(Some(config), None, None).unwrap(), 1).unwrap();
        // Two by three tiles, not resized.
        let size = Size { height: 6, width: 4 };
        let picture = Rgb { size, data: (0..72).collect() };
        let found = tiles(&picture, &rule).unwrap();
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
        assert_eq!(tiles(&one, &rule).unwrap(), [one]);
    }
}
