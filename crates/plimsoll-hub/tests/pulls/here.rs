//! The model that is in the program itself.

use std::fs;

use plimsoll_hub::{ModelRef, Quiet, Settings, pull};

use crate::fixtures::{cache, nowhere, settings};

#[test]
fn the_demo_model_needs_no_network_and_is_put_right() {
    let (_dir, cache) = cache();
    let settings = Settings { pip: vec![vec!["no-such-pip".into()]], ..settings(nowhere()) };
    let demo = ModelRef::parse("demo").unwrap();
    let path = pull(&demo, &cache, &settings, &mut Quiet).unwrap();
    let weights = path.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    let [cached] = &cache.list()[..] else { panic!("one model expected") };
    assert!(cached.verified && cached.name == "demo" && cached.source == "this program", "{cached:?}");
    // Damaged and lost files are written again, others are left.
    let config = path.join("config.json");
    let before = fs::metadata(&config).unwrap().modified().unwrap();
    fs::write(&weights, &whole[1..]).unwrap();
    fs::remove_file(path.join("tokenizer.json")).unwrap();
    assert_eq!(pull(&demo, &cache, &settings, &mut Quiet).unwrap(), path);
    assert!(fs::read(&weights).unwrap() == whole);
    assert!(path.join("tokenizer.json").is_file());
    assert_eq!(fs::metadata(&config).unwrap().modified().unwrap(), before);
    assert!(!path.join(".partial").exists());
}
