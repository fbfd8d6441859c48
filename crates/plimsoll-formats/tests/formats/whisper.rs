//! Published configurations of Whisper, and refusals.

use crate::common::open_config;
use plimsoll_formats::{Architecture, AudioKind, ModelConfig, Whisper};

/// A Whisper with the sizes of its class, and these keys.
fn opened(keys: &str) -> Result<ModelConfig, String> {
    let json = format!(r#"{{"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"{keys}}}"#);
    open_config(&json).map(|checkpoint| checkpoint.config).map_err(|error| error.to_string())
}

fn whisper(config: &ModelConfig) -> &Whisper {
    match &config.audio.as_ref().expect("an encoder").encoder {
        AudioKind::Whisper(whisper) => whisper,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_configuration_without_keys_has_the_sizes_of_its_class() {
    let config = opened("").expect("it opens");
    assert_eq!(
        (config.architecture.clone(), config.vocab_size, config.eos_token_ids.as_slice()),
        (Architecture::Whisper, 51_865, [50_256].as_slice())
    );
    assert_eq!((config.layers, config.hidden_size, config.heads, config.head_dim), (4, 384, 6, 64));
    let audio = config.audio.as_ref().expect("an encoder");
    assert_eq!((audio.depth, audio.hidden_size, audio.bands, audio.placeholder), (4, 384, 80, 50_256));
    let own = whisper(&config);
    assert_eq!((own.positions, own.text_positions, own.frames(), own.multilingual), (1500, 448, 3000, true));
    assert_eq!(config.max_context, 1948);
}

#[test]
fn languages_and_suppressed_tokens_are_read() {
    let keys = r#", "vocab_size": 51864, "suppress_tokens": [1, 2, 50361], "begin_suppress_tokens": [220, 50256]"#;
    let config = opened(keys).expect("it opens");
    let own = whisper(&config);
    assert_eq!(
        (own.suppressed.as_slice(), own.suppressed_first.as_slice()),
        ([1, 2, 50_361].as_slice(), [220, 50_256].as_slice())
    );
    assert!(!own.multilingual, "English alone");
    assert_eq!(own.first_time_max, None);
    let config = opened(r#", "max_initial_timestamp_index": 50"#).expect("it opens");
    assert_eq!(whisper(&config).first_time_max, Some(50));
}

#[test]
fn what_no_whisper_has_is_refused_by_name() {
    for (keys, words) in [
        (r#", "scale_embedding": true"#, "scale_embedding true; supported is false"),
        (r#", "tie_word_embeddings": false"#, "tie_word_embeddings false in a Whisper; supported is true"),
        (r#", "activation_function": "sine""#, "activation \"sine\""),
        (r#", "suppress_tokens": [-1]"#, "suppress_tokens is not a list of at most 1024 token ids"),
        (r#", "max_source_positions": 1000000"#, "max_source_positions"),
        (r#", "d_model": 100"#, "6 heads do not divide a hidden size of 100"),
    ] {
        let error = opened(keys).unwrap_err();
        assert!(error.contains(words), "{keys}: {error}");
    }
}
