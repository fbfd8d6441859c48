//! Vision and audio encoders on a GPU driver in software: the answers of transformers, the same bits alone and in company. The tests that
//! take the driver many minutes are manual.

use plimsoll_engine::{EngineHandle, Host, LoadedModel, Options, Request, start};
use plimsoll_memory::faults;
use serde_json::Value;

use crate::common::senses::{all_is_back, as_the_reference, encoders_kept_to_their_plan};
use crate::common::{Answer, alone, collect, exact, fixtures, heard, seen};
use crate::{allocations, on_gpu};

/// A model's test input: options in which its cases fit, and a function that makes a request of a case.
struct Asked {
    model: &'static str,
    small: fn(Options) -> Options,
    request: fn(&EngineHandle, &Value, u32) -> Request,
}

const fn sees(model: &'static str) -> Asked {
    Asked { model, small: seen::small, request: seen::request }
}

const fn hears(model: &'static str) -> Asked {
    Asked { model, small: heard::small, request: heard::request }
}

impl Asked {
    fn engine(&self, options: Options) -> EngineHandle {
        let options = on_gpu((self.small)(options));
        let loaded = LoadedModel::open(&fixtures().join("models").join(self.model)).unwrap();
        let host = Host::read(&options).unwrap();
        start(&loaded.checkpoint, loaded.tokenizer, &options, &host, |_| {})
            .unwrap_or_else(|error| panic!("{}: {error}", self.model))
    }

    fn cases(&self) -> Vec<Value> {
        seen::cases(self.model)
    }

    fn right(&self) {
        let engine = self.engine(exact());
        let taken = allocations(&engine);
        for case in self.cases() {
            as_the_reference(self.model, &case, &collect(engine.submit((self.request)(&engine, &case, 12)).unwrap()));
        }
        encoders_kept_to_their_plan(&engine);
        all_is_back(&engine);
        assert!(engine.metrics().encoded_media.get() > 0, "{}", self.model);
        assert_eq!((allocations(&engine), taken.1), (taken, 0), "{}: memory was taken after ready", self.model);
        engine.stop();
    }

    /// Runs every case alone, then all at once, with chunks that end inside media and with a pool that is too small for all.
    fn the_same_in_company(&self, rows: usize) {
        let (model, cases) = (self.model, self.cases());
        let alone: Vec<Answer> = {
            let engine = self.engine(Options { prefix_cache: false, ..exact() });
            let answer = |case| collect(engine.submit((self.request)(&engine, case, 20)).unwrap());
            let answers = cases.iter().map(answer).collect();
            engine.stop();
            answers
        };
        let small_step = Options { graph_max_batch_size: 8, running_max_req_size: 8, ..exact() };
        for options in [
            Options { batch_max_tokens: rows, ..small_step },
            Options { visual_infer_batch_size: 3, ..exact() },
            Options { max_total_token_num: Some(320), max_req_total_len: Some(256), ..exact() },
        ] {
            let engine = self.engine(options);
            let submit = |i: usize| engine.submit((self.request)(&engine, &cases[i % cases.len()], 20)).unwrap();
            let readers: Vec<_> = (0..12).map(submit).collect();
            for (i, reader) in readers.into_iter().enumerate() {
                collect(reader).is_the_same_as(&alone[i % cases.len()], &format!("{model}: request {i}"));
            }
            all_is_back(&engine);
            assert_eq!(allocations(&engine).1, 0, "{model}");
            engine.stop();
        }
    }
}

#[test]
#[ignore = "manual: software takes minutes for each model"]
fn manual_vision_models_see_what_transformers_sees() {
    let _alone = alone();
    for model in ["vl-qwen2", "vl-qwen2.5", "vl-qwen3", "vl-qwen3-moe", "vl-qwen3.5", "vl-qwen3.5-moe"] {
        sees(model).right();
    }
}

#[test]
#[ignore = "external"]
fn encoders_of_one_size_do_too() {
    let _alone = alone();
    ["vl-gemma3", "vl-intern", "vl-intern-rms", "vl-intern-chat"].into_iter().for_each(|model| sees(model).right());
}

#[test]
#[ignore = "external"]
fn encoders_of_squares_and_of_rows_of_tokens_do_too() {
    let _alone = alone();
    ["vl-idefics3", "vl-mistral3"].into_iter().for_each(|model| sees(model).right());
}

#[test]
#[ignore = "external"]
fn an_encoder_that_bounds_its_activations_does_too() {
    let _alone = alone();
    sees("vl-gemma4-e2b").right();
}

#[test]
#[ignore = "manual: software takes minutes for each model"]
fn manual_quantized_encoders_do_too() {
    let _alone = alone();
    ["vl-gguf-qwen2.5", "vl-gguf-qwen3"].into_iter().for_each(|model| sees(model).right());
}

#[test]
#[ignore = "external"]
fn models_hear_what_transformers_hears() {
    let _alone = alone();
    ["asr", "vl-gemma4-audio"].into_iter().for_each(|model| hears(model).right());
}

#[test]
#[ignore = "manual: software takes minutes for each model"]
fn manual_qwen3_omni_hears_what_transformers_hears() {
    let _alone = alone();
    hears("omni").right();
}

#[test]
#[ignore = "manual: software takes minutes for each model"]
fn manual_i9_media_in_company() {
    let _alone = alone();
    sees("vl-qwen3.5").the_same_in_company(16);
    sees("vl-qwen2.5").the_same_in_company(16);
    // An image of nine tokens that is computed in one step needs rows beside those of eight requests.
    sees("vl-gemma3").the_same_in_company(17);
    hears("omni").the_same_in_company(16);
}

/// The encoder of a GGUF model is also loaded again.
#[test]
#[ignore = "manual: software takes minutes for each model"]
fn manual_a_gpu_that_is_lost_while_it_encodes_is_opened_again() {
    let _alone = alone();
    let asked = sees("vl-gguf-qwen3");
    let (engine, cases) = (asked.engine(exact()), asked.cases());
    let answer = |case: &Value| collect(engine.submit((asked.request)(&engine, case, 12)).unwrap());
    as_the_reference(asked.model, &cases[0], &answer(&cases[0]));
    faults::arm_site(faults::Site::LoseDevice, 1);
    let lost = answer(&cases[1]);
    assert_eq!(faults::disarm_site().hit, 1);
    assert!(lost.error.is_some(), "the request ends with an error");
    as_the_reference(asked.model, &cases[1], &answer(&cases[1]));
    all_is_back(&engine);
    assert_eq!(allocations(&engine).1, 0);
    engine.stop();
}
