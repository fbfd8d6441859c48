use plimsoll_engine::{FrameTimes, Grid, ImageSpec, PlaceRule, Spelling, VideoSpec};
use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{Cut, ImageRule, PatchVideo, Patches, ProcessorFiles, VideoRule};
use plimsoll_media::image::{Filter, Normalize};
use plimsoll_media::{ContentKey, OutputPool, Shape, Size, Staging};
use serde_json::json;

use super::*;
use crate::media::measure::Piece;

const IMAGE: u32 = 0;
const VIDEO: u32 = 1;

/// A tokenizer that knows four special tokens and every ASCII letter.
fn tokenizer() -> Tokenizer {
    let names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"];
    let special = |(id, content): (usize, &&str)| json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    let added: Vec<Value> = names.iter().enumerate().map(special).collect();
    let vocab: Map<String, Value> =
        (0x21..0x7f_u8).map(|byte| (char::from(byte).to_string(), (u32::from(byte)).into())).collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let description = json!({"version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": level, "post_processor": null,
        "decoder": level, "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tokenizer.json");
    std::fs::write(&path, description.to_string()).unwrap();
    Tokenizer::from_file(&path).unwrap()
}

fn spec() -> MediaSpec {
    let files = ProcessorFiles::read(Some(r#"{"patch_size": 2, "merge_size": 2}"#), None, None).unwrap();
    let normalize = Normalize::new(&files.image, Normalize::HALVES).unwrap();
    MediaSpec {
        image: Some(ImageSpec {
            rule: ImageRule::Patches(Patches::image(&files.image, None).unwrap()),
            normalize,
            placeholder: IMAGE,
            tokens_max: 1000,
            bounds: [].into(),
        }),
        video: Some(VideoSpec {
            rule: VideoRule::Patches(PatchVideo::new(&files.video, Budget::Video, None).unwrap()),
            normalize,
            placeholder: VIDEO,
            tokens_max: 1000,
            bounds: [].into(),
        }),
        audio: None,
        parameters: String::new(),
        places: Some(PlaceRule { merge: 2, frames_apart: true, steps_per_second: None, times: FrameTimes::Cut }),
        image_in_one_step: false,
        spelling: Spelling::Timed,
        items_max: 8,
        batch: 1,
        staging: Staging::new(1 << 20),
        outputs: OutputPool::new(4, 4, 4).unwrap(),
    }
}

fn measured(modality: Modality, tokens: u64, times: &[f64]) -> Measured {
    Measured {
        param: "messages".into(),
        key: ContentKey::of(modality, "", b""),
        shape: Shape { modality, rows: 4 * tokens, sequences: 1, longest: 4 * tokens, tokens },
        grid: Grid { frames: 1, height: 2, width: 2 },
        times: times.to_vec(),
        seconds: None,
        stretches: Vec::new(),
        of_video: false,
        clip_frames: 0,
        windowed: None,
        first: 0,
        decode_bytes: 0,
        pixel_bytes: 0,
        files: Vec::new(),
        film: None,
        frames: None,
        canvas: Size::new(4, 4),
        filter: Filter::default(),
        tile: Size::new(4, 4),
        runs: times.len().max(1) as u64,
        cut: None,
        steps: None,
        pieces: Vec::new(),
    }
}

/// An image of two tiles in a row, of four tokens each, and the whole image of three.
fn cut() -> Measured {
    let piece = |tokens| {
        let whole = measured(Modality::Image, tokens, &[]);
        Piece { size: whole.tile, grid: whole.grid, shape: whole.shape, first: 0 }
    };
    let cut = Some(Cut { columns: 2, rows: 1, whole: Some(Size::new(4, 4)) });
    Measured { cut, pieces: [4, 4, 3].map(piece).into(), runs: 3, ..measured(Modality::Image, 11, &[]) }
}

#[test]
fn pieces_stand_behind_their_places_and_begin_where_they_do() {
    let tokenizer = tokenizer();
    let [start, end, whole] = ["<s>", "</s>", "<w>"].map(str::to_owned);
    let spec = MediaSpec { spelling: Spelling::Pieces { start, end, whole }, video: None, ..spec() };
    let placeholders = Placeholders::new(&spec, &tokenizer);
    let mut media = [measured(Modality::Image, 2, &[]), cut()];
    let spelled = placeholders.spell("a<|image_pad|>b<|image_pad|>c".into(), &media);
    let expected = "a<s><|image_pad|></s>b<s><|img_row_1_col_1|><|image_pad|><|img_row_1_col_2|><|image_pad|><w><|image_pad|></s>c";
    assert_eq!(spelled, expected);
    let ids = vec![70, IMAGE, 71, IMAGE, 72, IMAGE, 73, IMAGE, 74];
    let all = placeholders.expand("messages", ids, &mut media, 18).unwrap();
    assert_eq!(all.len(), 18);
    assert_eq!((media[0].first, media[1].first), (1, 4));
    let first: Vec<u32> = media[1].pieces.iter().map(|piece| piece.first).collect();
    assert_eq!((first, &all[8..10]), (vec![4, 9, 14], &[72, IMAGE][..]));
}

#[test]
fn rows_of_tokens_have_a_word_behind_each() {
    let tokenizer = tokenizer();
    let [next, end] = ["<n>", "<e>"].map(str::to_owned);
    let spec = MediaSpec { spelling: Spelling::Rows { next, end }, video: None, ..spec() };
    let placeholders = Placeholders::new(&spec, &tokenizer);
    let mut media = [Measured { runs: 3, ..measured(Modality::Image, 6, &[]) }];
    let spelled = placeholders.spell("a<|image_pad|>b".into(), &media);
    assert_eq!(spelled, "a<|image_pad|><n><|image_pad|><n><|image_pad|><e>b");
    let all = placeholders.expand("messages", vec![70, IMAGE, 71, IMAGE, 71, IMAGE, 72], &mut media, 10).unwrap();
    assert_eq!(all, [70, IMAGE, IMAGE, 71, IMAGE, IMAGE, 71, IMAGE, IMAGE, 72]);
}

#[test]
fn squares_stand_in_rows_before_the_whole_image() {
    let tokenizer = tokenizer();
    let [around, whole] = ["<f>", "<g>"].map(str::to_owned);
    let spec = MediaSpec { spelling: Spelling::Squares { around, whole }, video: None, ..spec() };
    let media = [measured(Modality::Image, 2, &[]), cut()];
    let spelled = Placeholders::new(&spec, &tokenizer).spell("a<|image_pad|>b<|image_pad|>c".into(), &media);
    let expected =
        "a<f><g><|image_pad|><f>b<f><row_1_col_1><|image_pad|><f><row_1_col_2><|image_pad|>\n\n<f><g><|image_pad|><f>c";
    assert_eq!(spelled, expected);
}

#[test]
fn tiles_stand_in_rows_before_the_word_of_the_template() {
    let tokenizer = tokenizer();
    let [image, start, end, column, row] = ["<i>", "<s>", "<e>", "<x>", "<y>"].map(str::to_owned);
    let spec = MediaSpec { spelling: Spelling::Tiled { image, start, end, column, row }, video: None, ..spec() };
    let media = [measured(Modality::Image, 2, &[]), cut()];
    let spelled = Placeholders::new(&spec, &tokenizer).spell("a<i>b<i>c".into(), &media);
    let pad = "<|image_pad|>";
    assert_eq!(spelled, format!("a<s><i>{pad}<e>b<s>{pad}<x>{pad}<y><i>{pad}<e>c"));
}

#[test]
fn placeholders_become_as_many_as_their_media_have_tokens() {
    let (spec, tokenizer) = (spec(), tokenizer());
    let placeholders = Placeholders::new(&spec, &tokenizer);
    let mut media = [
        measured(Modality::Image, 3, &[]),
        measured(Modality::Video, 4, &[0.0, 1.0]),
        measured(Modality::Image, 1, &[]),
    ];
    let ids = vec![70, IMAGE, 71, VIDEO, 72, VIDEO, IMAGE, 73];
    let all = placeholders.expand("messages", ids.clone(), &mut media, 13).unwrap();
    assert_eq!(all, [70, 0, 0, 0, 71, 1, 1, 72, 1, 1, 0, 73]);
    assert_eq!(media.each_ref().map(|medium| medium.first), [1, 5, 10]);
    let over = placeholders.expand("messages", ids, &mut media, 11).unwrap_err();
    assert_eq!(over.code, Some("context_length_exceeded"));
    // More, fewer, and other placeholders, and another order.
    for bad in [
        vec![IMAGE],
        vec![IMAGE, VIDEO, VIDEO],
        vec![VIDEO, VIDEO, IMAGE, IMAGE],
        vec![IMAGE, VIDEO, IMAGE, VIDEO, IMAGE],
        vec![IMAGE, VIDEO, VIDEO, IMAGE, IMAGE],
        vec![],
    ] {
        let error = placeholders.expand("messages", bad.clone(), &mut media, 100).unwrap_err();
        assert!(error.message.contains("one placeholder for each"), "{bad:?}: {}", error.message);
    }
    assert_eq!(placeholders.expand("messages", vec![70], &mut [], 100).unwrap(), [70]);
}

#[test]
fn frames_are_told_when_they_are_shown_as_their_processor_tells_it() {
    let (spec, tokenizer) = (spec(), tokenizer());
    let placeholders = Placeholders::new(&spec, &tokenizer);
    let whole = "<|vision_start|><|video_pad|><|vision_end|>";
    let media = [
        measured(Modality::Image, 3, &[]),
        measured(Modality::Video, 4, &[0.25, 10.0]),
        measured(Modality::Video, 1, &[1.96]),
    ];
    let prompt = format!("a<|vision_start|><|image_pad|><|vision_end|>{whole}b{whole}c");
    let stamped = placeholders.spell(prompt, &media);
    let expected = format!(
        "a<|vision_start|><|image_pad|><|vision_end|><0.2 seconds>{whole}<10.0 seconds>{whole}b<2.0 seconds>{whole}c"
    );
    assert_eq!(stamped, expected);
}

#[test]
fn images_of_tiles_stand_between_words_and_frames_are_numbered() {
    let (spec, tokenizer) = (spec(), tokenizer());
    let words = ["<img>", "</img>", "<video>"].map(String::from);
    let [start, end, video] = words;
    let image = spec.image.clone().unwrap();
    // The frames of a video have the placeholder of images.
    let film = VideoSpec { placeholder: image.placeholder, ..spec.video.clone().unwrap() };
    let spelling = Spelling::Framed { start, end, video };
    let spec = MediaSpec { spelling, video: Some(film), ..spec };
    let placeholders = Placeholders::new(&spec, &tokenizer);
    let pad = "<|image_pad|>";
    let mut media = [
        measured(Modality::Image, 7, &[]),
        Measured { runs: 2, ..measured(Modality::Video, 8, &[]) },
        measured(Modality::Image, 1, &[]),
    ];
    let spelled = placeholders.spell(format!("a{pad}\nb<video>\n{pad}c"), &media);
    let whole = format!("<img>{pad}</img>");
    assert_eq!(spelled, format!("a{whole}\nbFrame1: {whole}\nFrame2: {whole}\n{whole}c"));
    // This tokenizer has no white space.
    let spelled = spelled.replace([' ', '\n'], "");
    let ids = tokenizer.encode_pieces(&[&*spelled], false, true).unwrap();
    let all = placeholders.expand("messages", ids, &mut media, 1000).unwrap();
    assert_eq!(all.iter().filter(|id| **id == IMAGE).count(), 16);
    let starts = media.each_ref().map(|medium| medium.first as usize);
    let frames = all[starts[1]..starts[2]].iter().filter(|id| **id == IMAGE).count();
    assert!(all[starts[0]..][..7].iter().all(|id| *id == IMAGE) && frames == 8);
    // The word for a video in a client's text does not stand for one.
    let mut messages = json!("see <video>");
    let guarded = placeholders.guard("messages", vec![&mut messages], &mut Map::new()).unwrap();
    let said = messages.as_str().unwrap().to_owned();
    assert!(!said.contains("<video>") && guarded.plain(said.clone()) == "see <video>");
    assert_eq!(placeholders.spell(said.clone(), &media[1..2]), said);
}

#[test]
fn frames_stand_behind_the_minute_and_second_at_which_they_are_shown() {
    let tokenizer = tokenizer();
    let [start, end, video] = ["<|vision_start|>", "<|vision_end|>", "<film>"].map(str::to_owned);
    let audio = ["<|audio>", "<audio|>"].map(str::to_owned);
    let spec = MediaSpec { spelling: Spelling::Clocked { start, end, video, audio }, ..spec() };
    let placeholders = Placeholders::new(&spec, &tokenizer);
    let media = [measured(Modality::Video, 4, &[0.0, 61.9, 6000.0]), measured(Modality::Image, 2, &[])];
    let spelled = placeholders.spell("a<film>b<|image_pad|>c".into(), &media);
    let whole = |pad| format!("<|vision_start|>{pad}<|vision_end|>");
    let (frame, image) = (whole("<|video_pad|>"), whole("<|image_pad|>"));
    assert_eq!(spelled, format!("a00:00 {frame} 01:01 {frame} 100:00 {frame}b{image}c"));
    // The template's word for a video in a client's text does not stand for one.
    let mut messages = json!("see <film>");
    placeholders.guard("messages", vec![&mut messages], &mut Map::new()).unwrap();
    assert!(!messages.as_str().unwrap().contains("<film>"), "{messages}");
}

#[test]
fn an_image_becomes_a_paragraph_between_its_words() {
    let tokenizer = tokenizer();
    let [start, end] = ["<|vision_start|>", "<|vision_end|>"].map(str::to_owned);
    let spec = MediaSpec { spelling: Spelling::Paragraph { start, end }, video: None, ..spec() };
    let placeholders = Placeholders::new(&spec, &tokenizer);
    let media = [measured(Modality::Image, 2, &[]), measured(Modality::Image, 2, &[])];
    let spelled = placeholders.spell("a<|vision_start|>b<|vision_start|>c".into(), &media);
    let whole = "\n\n<|vision_start|><|image_pad|><|vision_end|>\n\n";
    assert_eq!(spelled, format!("a{whole}b{whole}c"));
    // The template's word for an image in a client's text does not stand for one.
    let mut messages = json!("see <|vision_start|> and <|image_pad|>");
    let guarded = placeholders.guard("messages", vec![&mut messages], &mut Map::new()).unwrap();
    let said = messages.as_str().unwrap().to_owned();
    assert!(!said.contains("<|vision_start|>") && !said.contains("<|image_pad|>"), "{said}");
    assert_eq!(placeholders.spell(said.clone(), &media), said);
    assert_eq!(guarded.plain(said), "see <|vision_start|> and <|image_pad|>");
}

#[test]
fn media_become_placeholders_in_text_where_that_is_all_that_a_template_writes() {
    let tokenizer = tokenizer();
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "video"}]},
        {"role": "assistant", "content": null},
    ]);
    let written = |spelling| Placeholders::new(&MediaSpec { spelling, ..spec() }, &tokenizer).as_text(&messages);
    let [start, end, video] = ["<s>", "</s>", "<v>"].map(str::to_owned);
    let framed = written(Spelling::Framed { start, end, video }).unwrap();
    assert_eq!(framed[1]["content"], "<|image_pad|>\na<v>\n");
    assert_eq!((&framed[0], &framed[2]), (&messages[0], &messages[2]));
    let [next, end] = ["<n>", "<e>"].map(str::to_owned);
    assert_eq!(written(Spelling::Rows { next, end }).unwrap()[1]["content"], "<|image_pad|>a<|video_pad|>");
    assert_eq!(written(Spelling::Timed), None);
    let spec = spec();
    let placeholders = Placeholders::new(&spec, &tokenizer);
    assert!(placeholders.any_in("a<|image_pad|>") && !placeholders.any_in("a<|image"));
}

#[test]
fn what_a_client_spells_is_text() {
    let (spec, tokenizer) = (spec(), tokenizer());
    let placeholders = Placeholders::new(&spec, &tokenizer);
    let said = "x<|image_pad|>y<|video_pad|><|image_pad|>";
    let mut messages = json!([{"role": "user", "content": [{"type": "text", "text": said}, {"type": "image"}], "<|image_pad|>": [said]}]);
    let mut extra = json!({"mood": said}).as_object().cloned().unwrap();
    let guarded = placeholders.guard("messages", vec![&mut messages], &mut extra).unwrap();
    for text in [&messages[0]["content"][0]["text"], &extra["mood"]] {
        let pieces = guarded.pieces(text.as_str().unwrap());
        let ids = tokenizer.encode_pieces(&pieces, false, true).unwrap();
        assert!(!ids.contains(&IMAGE) && !ids.contains(&VIDEO), "{ids:?}");
        assert_eq!(tokenizer.decode(&ids, false), said);
        assert_eq!(guarded.plain(text.as_str().unwrap().to_owned()), said);
    }
    assert!(!messages.to_string().contains("<|image_pad|>"));
    // Noncharacters in a client's text do not let a placeholder through.
    let mut messages = json!(format!("{}\u{FDD0}{said}", "<\u{FDD0}|image_pad|>"));
    let guarded = placeholders.guard("messages", vec![&mut messages], &mut Map::new()).unwrap();
    assert_eq!(guarded.cut, Some('\u{FDD1}'));
    let ids = tokenizer.encode_pieces(&guarded.pieces(messages.as_str().unwrap()), false, true).unwrap();
    assert!(!ids.contains(&IMAGE) && !ids.contains(&VIDEO), "{ids:?}");
    let all: String = CUTS.collect();
    let mut messages = json!(format!("{all}<|image_pad|>"));
    assert!(placeholders.guard("messages", vec![&mut messages], &mut Map::new()).is_err());
    // Messages without a placeholder stay as they are.
    let mut messages = json!([all, "<|image_pad", "|image_pad|>"]);
    let before = messages.clone();
    assert_eq!(placeholders.guard("messages", vec![&mut messages], &mut Map::new()).unwrap().cut, None);
    assert_eq!(messages, before);
}
