//! Faults of images: decompression bombs, queues before the encoder, outputs that stay, one user's image in another's answer.

use std::time::Duration;

use serde_json::{Value, json};

use crate::image::{chat, file, linked, part, png, rows, stored};
use crate::product::{Server, eventually, fixture, plimsoll};
use crate::visitor::{
    anonymous, cached, count, greedy, keeps_its_plan, number, prompt, refused, rests, says, serve, served, with,
};

const CHAT: &str = "/v1/chat/completions";

/// Images of at most 64 × 64: 64 tokens each.
const SMALL: [&str; 2] = ["--max-image-pixels", "4096"];

/// Log-probabilities of an answer, and its cached prompt tokens.
fn answer(server: &Server, images: &[Value]) -> (Value, u64) {
    let answer = server.ask(CHAT, &chat(images, 6));
    (answer["choices"][0]["logprobs"].clone(), cached(&answer))
}

/// Asks `count` times about images, from four clients at once.
fn visitors(server: &Server, count: u64, images: impl Fn(u64) -> Vec<Value> + Sync) {
    crate::visitor::crowd(server, count, |i| (CHAT, chat(&images(i), 4)));
}

// MiaAI GLM 183: profiling of media was skipped, and 33 frames of a film came as images.
#[test]
fn t_24_more_images_than_were_planned_are_refused() {
    let server = serve("vl-qwen3", &[&SMALL[..], &["--max-media-per-request", "8"]].concat());
    let frames: Vec<Value> = (0..33).map(|i| part(&png(16, 16, i))).collect();
    let words = refused(server.post(CHAT, &chat(&frames, 2)), 400);
    assert!(words.contains("--max-media-per-request") && words.contains('8'), "{words}");
    server.ask(CHAT, &chat(&frames[..8], 2));
    rests(&server);
    keeps_its_plan(&server);
}

/// Room for the outputs of three images of 128 × 128, 256 tokens of 96 numbers each.
const ROOM_FOR_THREE: [&str; 4] = ["--encoder-output-bytes", "294912", "--max-video-frames", "2"];

// vllm 31857, 31699, 31765; lightllm 901: waiting requests held what others needed to go on, and all of them waited.
#[test]
fn t_25_t_35_two_images_each_in_room_for_three_all_finish() {
    let server = serve("vl-qwen3", &[&ROOM_FOR_THREE[..], &["--batch-max-tokens", "64"]].concat());
    assert_eq!(server.memory()["pools"]["encoder_outputs"]["total"], 24, "pages of 32 rows");
    visitors(&server, 24, |i| vec![part(&png(128, 128, 2 * i)), part(&png(128, 128, 2 * i + 1))]);
    // The last answer may be read before its request is counted.
    rests(&server);
    assert_eq!((count(&server, "finished"), count(&server, "failed")), (24, 0));
    keeps_its_plan(&server);
}

// vllm 33110, 26223: an item larger than the encoder's cache waited for ever.
#[test]
fn t_26_images_that_the_pool_can_never_hold_are_refused_at_once() {
    let server = serve("vl-qwen3", &ROOM_FOR_THREE);
    let images: Vec<Value> = (0..4).map(|i| part(&png(128, 128, i))).collect();
    let words = refused(server.post(CHAT, &chat(&images, 2)), 400);
    assert!(words.contains("--encoder-output-bytes"), "{words}");
    server.ask(CHAT, &chat(&images[..3], 2));
    rests(&server);
}

// vllm 40707, 47738, 51603: two images on a hybrid, across the edges of chunks, made no progress at all.
#[test]
fn t_28_images_across_chunks_of_a_hybrid_are_seen_as_in_one() {
    let images = [part(&png(64, 48, 1)), part(&png(40, 64, 2)), part(&png(64, 64, 3))];
    let whole = answer(&serve("vl-qwen3.5", &SMALL), &images);
    for rows in ["16", "48"] {
        let server =
            serve("vl-qwen3.5", &[&SMALL[..], &["--batch-max-tokens", rows, "--graph-max-batch-size", "8"]].concat());
        assert_eq!(answer(&server, &images).0, whole.0, "steps of {rows} rows");
        visitors(&server, 8, |i| vec![part(&png(64, 64, i)), part(&png(64, 64, 50 + i))]);
        rests(&server);
        keeps_its_plan(&server);
    }
}

// vllm 9190, 12973, 14805, 35191; sglang 8902, 9365; mistral.rs 1446: pixels and features stayed, 1 TB after some days.
#[test]
fn t_29_t_33_v_03_hundreds_of_images_leave_nothing() {
    let server = serve("vl-qwen3", &[&SMALL[..], &["--media-bytes", "4000000"]].concat());
    let round = |seed: u64| {
        visitors(&server, 120, |i| vec![part(&png(64, 64, seed + i))]);
        rests(&server);
        anonymous(&server)
    };
    let (_warm, before, after) = (round(0), round(1000), round(2000));
    assert!(after - before <= 1 << 20, "{} bytes more", after - before);
    assert_eq!(count(&server, "failed"), 0);
    keeps_its_plan(&server);
}

// vllm 47010; sglang 28587, 28588; mlxcel 50: a hundred kilobytes that unpack to gigabytes.
#[test]
fn t_31_image_larger_than_its_header_costs_nothing() {
    let server = serve("vl-qwen3", &[&SMALL[..], &["--max-decode-pixels", "30000"]].concat());
    let before = anonymous(&server);
    for bytes in [file(30_000, 30_000, &vec![0x78; 100_000]), file(u32::MAX, u32::MAX, b"\x78\x01"), png(200, 200, 1)] {
        let words = refused(server.post(CHAT, &chat(&[part(&bytes)], 2)), 400);
        assert!(words.contains("pixels"), "{words}");
    }
    assert!(anonymous(&server) - before <= 8 << 20, "{} bytes more", anonymous(&server) - before);
    server.ask(CHAT, &chat(&[part(&png(150, 200, 1))], 2));
    rests(&server);
}

// lightllm 902: a size of nothing was not handled; others: strips that no rule can resize.
#[test]
fn t_36_the_smallest_the_flattest_and_the_empty() {
    let server = serve("vl-qwen3", &SMALL);
    for (width, height) in [(1, 1), (1, 8), (64, 1), (65, 63), (150, 3)] {
        server.ask(CHAT, &chat(&[part(&png(width, height, 1))], 2));
    }
    for bytes in [png(0, 5, 1), png(900, 1, 1), Vec::new(), b"GIF89a".to_vec()] {
        refused(server.post(CHAT, &chat(&[part(&bytes)], 2)), 400);
    }
    rests(&server);
}

// lightllm 1253, 1273, its incident of 2026-05-09: a truncated image ended the worker thread; every request hung.
#[test]
fn t_38_a_truncated_image_is_the_error_of_its_request_alone() {
    let server = serve("vl-qwen3", &SMALL);
    let whole = png(64, 64, 1);
    let expected = answer(&server, &[part(&whole)]).0;
    let photo = std::fs::read(fixture("llama").join("../../media/rgb.png")).expect("a fixture");
    for bytes in [&whole, &photo] {
        for cut in [8, 30, 60, bytes.len() / 2, bytes.len() - 20] {
            let answer = server.post(CHAT, &chat(&[part(&bytes[..cut])], 2));
            refused(answer, 400);
        }
        let mut flipped = bytes.clone();
        flipped.iter_mut().skip(50).step_by(7).for_each(|byte| *byte ^= 0x55);
        refused(server.post(CHAT, &chat(&[part(&flipped)], 2)), 400);
    }
    assert_eq!(answer(&server, &[part(&whole)]).0, expected);
    assert_eq!(says(&server, &greedy(&prompt(1, 20), 5)).len(), 5);
    rests(&server);
}

// vllm-mlx 354: an abort changed a batch with images in the middle of a step.
#[test]
fn v_26_aborts_beside_images_change_no_other_answer() {
    let server = serve("vl-qwen3", &SMALL);
    let stay = |i: u64| vec![part(&png(64, 64, i)), part(&png(32, 48, i))];
    let alone: Vec<Value> = (0..3).map(|i| answer(&server, &stay(i)).0).collect();
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| {
            for i in 0..60 {
                let client =
                    server.send(CHAT, &with(chat(&[part(&png(64, 64, 100 + i))], 300), json!({"stream": i % 2 == 0})));
                std::thread::sleep(Duration::from_millis(i % 9));
                drop(client);
            }
        });
        while !leaving.is_finished() {
            (0..3).for_each(|i| assert_eq!(answer(&server, &stay(i)).0, alone[i as usize]));
        }
    });
    rests(&server);
    assert_eq!(count(&server, "failed"), 0);
}

// vllm-mlx 206: the hash of an image was that of its first bytes; another user's image was found.
#[test]
fn v_47_images_with_the_same_beginning_are_two() {
    let server = serve("vl-qwen3", &SMALL);
    // The same head and the same first rows.
    let (rows_of_one, rows_of_other) = (rows(64, 64, 1), rows(64, 64, 2));
    let half = rows_of_one.len() / 2;
    let one = stored(64, 64, &rows_of_one);
    let mixed = stored(64, 64, &[&rows_of_one[..half], &rows_of_other[half..]].concat());
    let (first, _) = answer(&server, &[part(&one)]);
    let (second, _) = answer(&server, &[part(&mixed)]);
    assert_ne!(first, second, "a neighbour's picture was seen");
    let server = serve("vl-qwen3", &SMALL);
    assert_eq!(answer(&server, &[part(&mixed)]).0, second, "and cold it is the same");
}

// vllm-mlx 718, 768: prompts with the same placeholders shared keys and values, whatever their images; [a, b] was [b, a].
#[test]
fn v_k_images_are_told_apart_by_content_and_order() {
    let (a, b) = (part(&png(64, 64, 1)), part(&png(64, 64, 2)));
    let cold = |images: &[Value]| answer(&serve("vl-qwen3", &SMALL), images).0;
    let orders = [vec![a.clone()], vec![b.clone()], vec![a.clone(), b.clone()], vec![b.clone(), a.clone()]];
    let alone: Vec<Value> = orders.iter().map(|images| cold(images)).collect();
    let server = serve("vl-qwen3", &SMALL);
    for _ in 0..2 {
        for (images, alone) in orders.iter().zip(&alone) {
            assert_eq!(&answer(&server, images).0, alone, "after others with the same placeholders");
        }
    }
    assert!(answer(&server, &orders[3]).1 >= 128, "and what is the same is found");
    rests(&server);
}

// vllm-mlx models/mllm.py: files of media were deleted at exit only, and a map of images had no bound.
#[test]
fn v_e_no_image_becomes_a_file() {
    let folder = std::env::temp_dir().join(format!("plimsoll-museum-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut command = plimsoll(served("vl-qwen3", &SMALL));
    command.env("TMPDIR", &folder);
    let server = Server::try_start(command).unwrap_or_else(|words| panic!("{words}"));
    visitors(&server, 40, |i| vec![part(&png(64, 64, i))]);
    rests(&server);
    let files = std::fs::read_dir(&folder).expect("the folder").count();
    std::fs::remove_dir_all(&folder).expect("removed");
    assert_eq!(files, 0, "files of pictures");
    let open = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("it lives");
    let open: Vec<_> = open.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect();
    assert!(!open.iter().any(|path| path.to_string_lossy().contains("(deleted)")), "{open:?}");
}

// vllm-mlx 325: addresses in a request were fetched, those of the host's own network among them.
#[test]
fn v_61_local_images_and_files_are_not_readable() {
    let server = serve("vl-qwen3", &SMALL);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    for url in [
        format!("http://127.0.0.1:{port}/a.png"),
        format!("http://localhost:{port}/a.png"),
        format!("http://[::ffff:127.0.0.1]:{port}/a.png"),
        "file:///etc/passwd".into(),
        "ftp://example.org/a.png".into(),
    ] {
        refused(server.post(CHAT, &chat(&[linked(&url)], 2)), 400);
    }
    assert!(listener.accept().is_err(), "nobody was asked for a picture");
    rests(&server);
}

// vllm-mlx mllm_scheduler.py:776: the pixels of an aborted request stayed until the next one came.
#[test]
fn v_a2_last_request_with_an_image_returns_its_memory_without_a_successor() {
    let server = serve("vl-qwen3", &SMALL);
    let client = server.send(CHAT, &chat(&[part(&png(64, 64, 1))], 3000));
    eventually("it generates", || !server.rows("decode").is_empty());
    assert!(number(&server.memory()["pools"]["media_bytes"]["used"]) > 0, "it holds its picture");
    drop(client);
    rests(&server);
    assert_eq!((count(&server, "aborted"), count(&server, "finished")), (1, 0));
}
