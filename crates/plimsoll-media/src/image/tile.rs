//! An image cut into tiles of one size, and a small copy of the whole.

use super::{Filter, Rgb, resize};
use crate::Size;
use crate::geometry::Steps;

/// Returns the tiles of an image that is resized to `canvas`, which consists of them: from left to right and from top to bottom. Several
/// tiles are followed by the whole image at the size of one tile. The count is that of [`crate::geometry::Tiles::shape`]. InternVL.
pub fn tiles(image: &Rgb, canvas: Size, tile: Size, filter: Filter) -> Vec<Rgb> {
    let mut cut = cut(image, canvas, tile, filter);
    if cut.len() > 1 {
        cut.push(small(image, tile, filter));
    }
    cut
}

/// Returns the tiles of an image and, behind them, the whole image at size `whole`: LFM2-VL.
pub fn pieces(image: &Rgb, canvas: Size, tile: Size, whole: Option<Size>, filter: Filter) -> Vec<Rgb> {
    let mut cut = cut(image, canvas, tile, filter);
    cut.extend(whole.map(|whole| small(image, whole, filter)));
    cut
}

/// Returns the squares of an image and, behind several, the whole image as a square: Idefics3 and Llama 4. The image reaches `canvas` in
/// these steps. Of each square the first `seen` rows and columns are kept.
pub fn squares(image: Rgb, steps: Steps, canvas: Size, seen: Size, filter: Filter) -> Vec<Rgb> {
    let (first, square) = match steps {
        Steps::Twice { first, square } => (first, square),
        Steps::Laid { image: laid, tile } => return on_canvas(&image, laid, canvas, tile, filter),
    };
    // Each step consumes its image: memory holds two at a time.
    let step = |image: Rgb, to: Size| if image.size == to { image } else { resize(&image, to, filter) };
    let canvas = step(step(image, first), canvas);
    let mut all = parts(&canvas, square, seen);
    if all.len() > 1 {
        all.extend(parts(&resize(&canvas, square, filter), square, seen));
    }
    all
}

/// Returns the tiles of a black canvas with the image in its upper left corner, and behind several the whole image.
fn on_canvas(image: &Rgb, laid: Size, canvas: Size, tile: Size, filter: Filter) -> Vec<Rgb> {
    let mut all = {
        let laid = resize(image, laid, filter);
        let mut black = Rgb { size: canvas, data: vec![0; 3 * canvas.pixels() as usize] };
        let rows = black.data.chunks_exact_mut(3 * canvas.width as usize);
        for (to, from) in rows.zip(laid.data.chunks_exact(3 * laid.size.width as usize)) {
            to[..from.len()].copy_from_slice(from);
        }
        parts(&black, tile, tile)
    };
    if all.len() > 1 {
        all.push(small(image, tile, filter));
    }
    all
}

fn small(image: &Rgb, to: Size, filter: Filter) -> Rgb {
    let mut whole = resize(image, to, filter);
    whole.data.shrink_to_fit();
    whole
}

fn cut(image: &Rgb, canvas: Size, tile: Size, filter: Filter) -> Vec<Rgb> {
    parts(&resize(image, canvas, filter), tile, tile)
}

/// Returns the first `seen` rows and columns of every tile.
fn parts(canvas: &Rgb, tile: Size, seen: Size) -> Vec<Rgb> {
    let Size { height, width } = tile;
    let (columns, rows) = (canvas.size.width / width, canvas.size.height / height);
    (0..rows * columns)
        .map(|nth| (nth / columns * height, nth % columns * width))
        .map(|(top, left)| {
            let row = |y: u32| &canvas.data[3 * (y * canvas.size.width + left) as usize..][..3 * seen.width as usize];
            let mut data = Vec::with_capacity(3 * seen.pixels() as usize);
            (top..top + seen.height).for_each(|y| data.extend_from_slice(row(y)));
            Rgb { size: seen, data }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{ProcessorFiles, Tiles};

    #[test]
    fn tiles_are_the_parts_of_the_image_and_the_whole() {
        let config = r#"{"max_patches": 6, "size": {"height": 2, "width": 2}}"#;
        let rule = Tiles::new(&ProcessorFiles::read(Some(config), None, None).unwrap(), 1, 1).unwrap();
        // Two by three tiles, not resized.
        let size = Size { height: 6, width: 4 };
        let image = Rgb { size, data: (0..72).collect() };
        let found = tiles(&image, size, rule.tile, Filter::Bicubic);
        assert_eq!(found.len() as u64, rule.shape(size).unwrap().sequences);
        assert_eq!(found.len(), 7);
        for (tile, (top, left)) in found.iter().zip([(0, 0), (0, 2), (2, 0), (2, 2), (4, 0), (4, 2)]) {
            let byte = |y: u8, x: u8, c: u8| ((top + y) * 4 + left + x) * 3 + c;
            let pixel = |(y, x)| [byte(y, x, 0), byte(y, x, 1), byte(y, x, 2)];
            assert_eq!(tile.data, [(0, 0), (0, 1), (1, 0), (1, 1)].map(pixel).as_flattened());
        }
        assert_eq!(found[6], resize(&image, rule.tile, Filter::Bicubic));
        // One tile is its own thumbnail.
        let one = Rgb { size: rule.tile, data: (0..12).collect() };
        assert_eq!(tiles(&one, rule.tile, rule.tile, Filter::Bicubic), [one]);
    }
}
