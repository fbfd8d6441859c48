//! The chat template of Qwen3-ASR for GGUF files.
//!
//! llama.cpp's converter writes a template for text alone into the file, without a place for audio. The template here writes the prompts of
//! the published model.

use plimsoll_formats::{Audio, AudioKind, AudioTask};
use plimsoll_text::TemplateSources;

/// System texts, then all audio as one user turn, then the assistant's text.
const TEMPLATE: &str = include_str!("qwen3_asr.jinja");
/// The word for an audio clip in a template.
const PLACEHOLDER: &str = "<|audio_pad|>";

/// Returns the file's template, or [`TEMPLATE`] in place of a template without audio.
pub(super) fn template(audio: Option<&Audio>, own: Option<TemplateSources>) -> Option<TemplateSources> {
    let transcribes = audio.is_some_and(
        |audio| matches!(&audio.encoder, AudioKind::Windows(windows) if windows.task == AudioTask::Transcribe),
    );
    let takes_audio = own.as_ref().is_some_and(|own| own.default.contains(PLACEHOLDER));
    match transcribes && !takes_audio {
        true => Some(TemplateSources { default: TEMPLATE.to_owned(), tool_use: None }),
        false => own,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use plimsoll_formats::Checkpoint;
    use plimsoll_text::{ChatTemplate, Ending, chat_template_sources};
    use serde_json::{Map, json};

    use super::*;

    fn fixture(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(name)
    }

    #[test]
    fn prompts_are_those_of_the_template_with_audio() {
        let audio = Checkpoint::open(&fixture("gguf-asr/model.gguf")).unwrap().config.audio.clone();
        let plain = || Some(TemplateSources { default: "{{ messages }}".into(), tool_use: None });
        let other = chat_template_sources(&fixture("asr")).unwrap().unwrap();
        let [own, other] = [template(audio.as_ref(), plain()).unwrap(), other]
            .map(|sources| ChatTemplate::new(&sources.default, "", "").unwrap());
        let (clip, text) = (json!({"type": "audio"}), |text: &str| json!({"type": "text", "text": text}));
        let user = json!({"role": "user", "content": [clip, clip, text("dropped")]});
        let said = json!({"role": "assistant", "content": "language English<asr_text>"});
        for messages in [
            json!([user]),
            json!([{"role": "system", "content": "names"}, user, said]),
            json!([{"role": "system", "content": [text("a"), text("b")]}, {"role": "system", "content": "c"}, user]),
            json!([user, {"role": "assistant", "content": [text("c")]}, user]),
            json!([{"role": "user", "content": "a text"}]),
        ] {
            for ending in [Ending::Open, Ending::Closed] {
                let [own, other] = [&own, &other].map(|it| it.render(&messages, None, ending, &Map::new()).unwrap());
                assert_eq!(own, other, "{messages}");
            }
        }
    }

    #[test]
    fn other_models_keep_their_templates() {
        let own = || Some(TemplateSources { default: "{{ messages }}".into(), tool_use: None });
        let source = |sources: Option<TemplateSources>| sources.map(|sources| sources.default);
        assert_eq!(source(template(None, own())), source(own()));
        let mut audio = Checkpoint::open(&fixture("vl-gguf-omni/model.gguf")).unwrap().config.audio.clone();
        assert_eq!(source(template(audio.as_ref(), own())), source(own()));
        audio = Checkpoint::open(&fixture("gguf-asr/model.gguf")).unwrap().config.audio.clone();
        let with_audio = || Some(TemplateSources { default: "<|audio_pad|>".into(), tool_use: None });
        assert_eq!(source(template(audio.as_ref(), with_audio())), source(with_audio()));
    }
}
