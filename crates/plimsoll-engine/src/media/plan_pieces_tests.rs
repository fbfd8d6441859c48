//! The plan of images in pieces that are encoded one by one, and of InternVL in its original form.

use super::*;

#[test]
fn a30_no_piece_takes_more_than_the_worst_case() {
    let model = "vl-lfm2";
    let options = Options { max_video_frames: None, ..options() };
    let (blueprint, plan) = planned_of(model, &options).unwrap();
    let media = plan.media.as_ref().unwrap();
    let encoder = blueprint.model.vision().unwrap();
    let planner = Planner { encoder, weights: &blueprint.weights, kv: &plan.kv };
    let image = media.image.as_ref().unwrap();
    let ImageRule::Pieces(rule) = &image.rule else { panic!("{model} is cut into pieces") };
    let mut sizes: Vec<Size> = (1..90).flat_map(|h| (1..90).map(move |w| Size::new(h, w))).collect();
    sizes.extend((1..20).flat_map(|h| (1..400).step_by(3).flat_map(move |w| [Size::new(h, w), Size::new(w, h)])));
    let (mut pieces, mut tokens, mut pages) = (Vec::new(), 0u64, 0u64);
    for fit in sizes.into_iter().filter_map(|size| image.rule.fit(size).ok()) {
        let own: Vec<Size> = (0..fit.images).map(|_| fit.size).chain(fit.cut.and_then(|cut| cut.whole)).collect();
        let own_tokens = |size: &Size| rule.patches.piece(*size).tokens;
        assert_eq!(own.iter().map(own_tokens).sum::<u64>(), fit.shape.tokens, "{fit:?}");
        tokens = tokens.max(fit.shape.tokens);
        let own_pages = own.iter().map(|size| own_tokens(size).div_ceil(OUTPUT_PAGE_ROWS as u64));
        pages = pages.max(own_pages.sum());
        pieces.extend(own.iter().map(|size| (size.height as usize / 4, size.width as usize / 4)));
    }
    pieces.sort_unstable();
    pieces.dedup();
    let grids = pieces.iter().map(|(height, width)| Grid { frames: 1, height: *height, width: *width });
    let dearest = grids.map(|grid| planner.run(&[grid]).unwrap().0).max().unwrap();
    assert_eq!(dearest, media.workspace, "the worst case is one that occurs");
    // Four tiles of four tokens and the whole of up to six, each on a page of its own.
    assert_eq!((media.image_tokens(), tokens), (22, 4 * 4 + 6));
    assert_eq!((media.item_pages() as u64, pages), (5, 5));
    // Pixels buy tiles, then larger whole images.
    for (pixels, tokens) in [(1 << 20, 22), (3 * 256, 18), (2 * 256, 14), (511, 6), (200, 3), (128, 2)] {
        let options = Options { max_image_pixels: Some(pixels), ..options.clone() };
        assert_eq!(planned_of(model, &options).unwrap().1.media.unwrap().image_tokens(), tokens, "{pixels} pixels");
    }
    let none = Options { max_image_pixels: Some(127), ..options.clone() };
    let error = planned_of(model, &none).err().unwrap().to_string();
    assert!(error.contains("--max-image-pixels leaves 127 pixels"), "{error}");
    // A context too short for one image does not fail the plan; only requests with images are refused.
    for (context, tokens) in [(14, 14), (13, 6), (3, 3)] {
        let short = Options { max_req_total_len: Some(context), ..options.clone() };
        assert_eq!(planned_of(model, &short).unwrap().1.media.unwrap().image_tokens(), tokens, "{context} tokens");
    }
}

#[test]
fn the_largest_square_is_the_worst_of_images_with_a_longest_side() {
    let model = "vl-mistral3";
    let all = Options { max_image_pixels: None, ..options() };
    let (blueprint, plan) = planned_of(model, &all).unwrap();
    let media = plan.media.as_ref().unwrap();
    let planner = Planner { encoder: blueprint.model.vision().unwrap(), weights: &blueprint.weights, kv: &plan.kv };
    let image = media.image.as_ref().unwrap();
    // 45 pixels are six tokens of 8.
    assert_eq!(media.image_tokens(), 36);
    let sizes = (1..70).flat_map(|h| (1..70).map(move |w| Size::new(h, w)));
    let mut grids: Vec<(u32, u32)> = sizes
        .filter_map(|size| image.rule.fit(size).ok())
        .map(|fit| (fit.size.height / 4, fit.size.width / 4))
        .collect();
    grids.sort_unstable();
    grids.dedup();
    let run = |(height, width): (u32, u32)| {
        planner.run(&[Grid { frames: 1, height: height as usize, width: width as usize }]).unwrap().0
    };
    assert_eq!(grids.into_iter().map(run).max(), Some(media.workspace));
    for (pixels, tokens) in [(1 << 20, 36), (48 * 48, 36), (48 * 48 - 1, 25), (64, 1)] {
        let options = Options { max_image_pixels: Some(pixels), ..all.clone() };
        assert_eq!(planned_of(model, &options).unwrap().1.media.unwrap().image_tokens(), tokens, "{pixels} pixels");
    }
    let short = Options { max_req_total_len: Some(20), ..all };
    assert_eq!(planned_of(model, &short).unwrap().1.media.unwrap().image_tokens(), 16);
}

#[test]
fn tiles_on_a_canvas_are_planned_one_by_one_with_their_class_rows() {
    let model = "vl-llama4";
    let all = Options { max_image_pixels: None, ..options() };
    let (blueprint, plan) = planned_of(model, &all).unwrap();
    let media = plan.media.as_ref().unwrap();
    let planner = Planner { encoder: blueprint.model.vision().unwrap(), weights: &blueprint.weights, kv: &plan.kv };
    let tile = Grid { frames: 1, height: 4, width: 4 };
    assert_eq!(media.workspace, planner.run(&[tile]).unwrap().0, "room for one, not for seven");
    // Six tiles of four tokens and the whole image, each on a page of its own.
    assert_eq!((media.image_tokens(), media.item_pages()), (28, 7));
    let image = media.image.as_ref().unwrap();
    let sizes = [(1, 1), (1, 20_000), (20_000, 1), (16, 16), (17, 16), (33, 49), (1000, 1000), (20_000, 20_000)];
    let fits = sizes.map(|(height, width)| image.rule.fit(Size::new(height, width)).unwrap());
    assert_eq!(fits.map(|fit| fit.shape.tokens).into_iter().max(), Some(28));
    assert!(fits.iter().all(|fit| fit.size == Size::new(16, 16)));
    for (pixels, tokens) in [(1 << 20, 28), (6 * 256, 28), (6 * 256 - 1, 24), (512, 12), (511, 4), (256, 4)] {
        let options = Options { max_image_pixels: Some(pixels), ..all.clone() };
        assert_eq!(planned_of(model, &options).unwrap().1.media.unwrap().image_tokens(), tokens, "{pixels} pixels");
    }
    let none = Options { max_image_pixels: Some(255), ..all.clone() };
    let error = planned_of(model, &none).err().unwrap().to_string();
    assert!(error.contains("--max-image-pixels leaves 255 pixels"), "{error}");
    for (context, tokens) in [(28, 28), (27, 24), (11, 4), (3, 4)] {
        let short = Options { max_req_total_len: Some(context), ..all.clone() };
        assert_eq!(planned_of(model, &short).unwrap().1.media.unwrap().image_tokens(), tokens, "{context} tokens");
    }
}

#[test]
fn squares_are_planned_one_by_one_and_pixels_buy_more_of_them() {
    let model = "vl-smolvlm";
    let all = Options { max_image_pixels: None, ..options() };
    let (blueprint, plan) = planned_of(model, &all).unwrap();
    let media = plan.media.as_ref().unwrap();
    let planner = Planner { encoder: blueprint.model.vision().unwrap(), weights: &blueprint.weights, kv: &plan.kv };
    let square = Grid { frames: 1, height: 4, width: 4 };
    assert_eq!(media.workspace, planner.run(&[square]).unwrap().0, "room for one, not for ten");
    // Nine squares of four tokens and the whole image, each on a page of its own.
    assert_eq!((media.image_tokens(), media.item_pages()), (40, 10));
    for (pixels, tokens) in [(1 << 20, 40), (48 * 48, 40), (48 * 48 - 1, 20), (32 * 32, 20), (32 * 32 - 1, 4), (256, 4)]
    {
        let options = Options { max_image_pixels: Some(pixels), ..all.clone() };
        assert_eq!(planned_of(model, &options).unwrap().1.media.unwrap().image_tokens(), tokens, "{pixels} pixels");
    }
    let none = Options { max_image_pixels: Some(255), ..all.clone() };
    let error = planned_of(model, &none).err().unwrap().to_string();
    assert!(error.contains("--max-image-pixels leaves 255 pixels"), "{error}");
    for (context, tokens) in [(40, 40), (39, 20), (19, 4), (3, 4)] {
        let short = Options { max_req_total_len: Some(context), ..all.clone() };
        assert_eq!(planned_of(model, &short).unwrap().1.media.unwrap().image_tokens(), tokens, "{context} tokens");
    }
}

/// The plan of the original InternVL with members of its configuration replaced.
fn original(name: &str, changes: &[(&str, &str)], files: &[&str]) -> MediaPlan {
    let dir = tempfile::tempdir().unwrap();
    for file in files {
        std::fs::copy(fixture_of("vl-intern-chat").join(file), dir.path().join(file)).unwrap();
    }
    let path = dir.path().join("config.json");
    let config = std::fs::read_to_string(fixture_of("vl-intern-chat").join("config.json")).unwrap();
    std::fs::write(&path, changes.iter().fold(config, |config, (from, to)| config.replace(from, to))).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let plan = Blueprint::new(&checkpoint, &options()).and_then(|blueprint| blueprint.media_plan(&options()));
    plan.unwrap_or_else(|error| panic!("{name}: {error}")).unwrap()
}

#[test]
fn the_original_form_of_internvl_is_planned_as_that_for_transformers() {
    let of = |model: &str| planned_of(model, &options()).unwrap().1.media.unwrap();
    for (model, other) in [("vl-intern", "vl-intern-chat"), ("vl-intern-rms", "vl-intern-chat-rms")] {
        let (expected, found) = (of(model), of(other));
        let (images, others) = (expected.image.as_ref().unwrap(), found.image.as_ref().unwrap());
        assert_eq!(images, others, "{other}");
        assert_eq!(expected.video, found.video, "{other}");
        assert_eq!((expected.workspace, expected.image_tokens()), (found.workspace, found.image_tokens()), "{other}");
    }
}

#[test]
fn tiles_of_the_original_form_come_from_its_configuration() {
    const FILES: [&str; 3] = ["model.safetensors", "tokenizer.json", "preprocessor_config.json"];
    let tokens = |changes: &[(&str, &str)]| original("tiles", changes, &FILES).image_tokens();
    let most = r#""max_dynamic_patch": 4"#;
    assert_eq!(tokens(&[]), 5 * 4, "four tiles and a thumbnail");
    assert_eq!(tokens(&[(most, r#""max_dynamic_patch": 2"#)]), 3 * 4);
    assert_eq!(tokens(&[(r#""dynamic_image_size": true"#, r#""dynamic_image_size": false"#)]), 4);
    assert_eq!(
        tokens(&[(most, r#""max_dynamic_patch": 1"#), (r#""use_thumbnail": true"#, r#""use_thumbnail": false"#)]),
        4
    );
    // Without the file of a processor, values are normalized as the published code does.
    for files in [&FILES[..2], &[]] {
        let image = original("means", &[], files).image.unwrap();
        let published = [[0.485f32, 0.456, 0.406], [0.229, 0.224, 0.225]];
        let found = [image.normalize.mean, image.normalize.std];
        let pairs = found.as_flattened().iter().zip(published.as_flattened());
        // Bytes are normalized, not shares of 255.
        let near = |(found, expected): (&f32, &f32)| (found / 255.0 - expected).abs() < 1e-6;
        assert!(pairs.into_iter().all(near), "{image:?}");
    }
}
