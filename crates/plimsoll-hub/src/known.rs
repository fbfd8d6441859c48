//! Models of the hub with a short name here, from the smallest to the largest. Sizes and sums are the hub's. The first pull
//! records them, and a later pull must match them (see `marker`).
//!
//! Each row names a configuration, from which `plimsoll models --fits` plans without a fetch.

/// The purpose of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Text.
    Text,
    /// Text, with images in the prompt.
    Vision,
    /// Embeddings.
    Embeddings,
    /// Scores of documents.
    Rerank,
    /// Audio: transcriptions, or text with audio in the prompt.
    Audio,
}

/// The format of the weights in a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// A GGUF file of about five bits a weight (Q4_K_M).
    Q4,
    /// As the configuration says.
    AsConfigured,
}

/// A model with a short name.
#[derive(Debug)]
pub struct Known {
    /// The name users type.
    pub name: &'static str,
    /// Its purpose.
    pub kind: Kind,
    /// Millions of parameters.
    pub millions: u32,
    /// The licence of the weights.
    pub licence: &'static str,
    /// The repository, `org/repo`; none for a model of the catalogue.
    pub repo: Option<&'static str>,
    /// The format of its weights.
    pub weights: Weights,
    /// Its `config.json`, shortened to the fields that a plan needs.
    pub config: &'static str,
}

impl Kind {
    /// Returns its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Vision => "vision",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
            Self::Audio => "audio",
        }
    }
}

macro_rules! config {
    ($name:literal) => {
        include_str!(concat!("../../../tools/configs/", $name, ".json"))
    };
}

const APACHE: &str = "Apache-2.0";
const MIT: &str = "MIT";
const GEMMA: &str = "Gemma Terms of Use";
const LLAMA: &str = "Llama Community License";
const LFM: &str = "LFM Open License v1.0";

const fn gguf(
    name: &'static str,
    millions: u32,
    licence: &'static str,
    repo: &'static str,
    config: &'static str,
) -> Known {
    Known { name, kind: Kind::Text, millions, licence, repo: Some(repo), weights: Weights::Q4, config }
}

const fn checkpoint(
    name: &'static str,
    (kind, millions): (Kind, u32),
    licence: &'static str,
    repo: &'static str,
    config: &'static str,
) -> Known {
    Known { name, kind, millions, licence, repo: Some(repo), weights: Weights::AsConfigured, config }
}

/// Returns a GGUF file with an `mmproj` file beside it, which has the vision encoder.
const fn gguf_vision(
    name: &'static str,
    millions: u32,
    licence: &'static str,
    repo: &'static str,
    config: &'static str,
) -> Known {
    Known { kind: Kind::Vision, ..gguf(name, millions, licence, repo, config) }
}

/// Returns the row of a model of the catalogue.
const fn ours(name: &'static str, kind: Kind, millions: u32, licence: &'static str, config: &'static str) -> Known {
    let weights = if matches!(kind, Kind::Text) { Weights::Q4 } else { Weights::AsConfigured };
    Known { name, kind, millions, licence, repo: None, weights, config }
}

/// All models with a short name.
pub const KNOWN: &[Known] = &[
    ours("smollm2", Kind::Text, 135, APACHE, config!("smollm2-135m")),
    ours("gemma3-270m", Kind::Text, 268, GEMMA, config!("gemma-3-270m")),
    gguf("smollm2-360m", 362, APACHE, "bartowski/SmolLM2-360M-Instruct-GGUF", config!("smollm2-360m")),
    ours("qwen2.5-coder-0.5b", Kind::Text, 494, APACHE, config!("qwen2.5-0.5b")),
    gguf("falcon-h1-0.5b", 522, "Falcon-LLM License", "tiiuae/Falcon-H1-0.5B-Instruct-GGUF", config!("falcon-h1-0.5b")),
    gguf("qwen3-0.6b", 596, APACHE, "unsloth/Qwen3-0.6B-GGUF", config!("qwen3-0.6b")),
    gguf("gemma3-1b", 1_000, GEMMA, "unsloth/gemma-3-1b-it-GGUF", config!("gemma-3-1b")),
    gguf("lfm2-1.2b", 1_170, LFM, "LiquidAI/LFM2-1.2B-GGUF", config!("lfm2-1.2b")),
    gguf("llama3.2-1b", 1_236, LLAMA, "unsloth/Llama-3.2-1B-Instruct-GGUF", config!("llama-3.2-1b")),
    gguf("smollm2-1.7b", 1_711, APACHE, "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", config!("smollm2-1.7b")),
    gguf("qwen3-1.7b", 1_721, APACHE, "unsloth/Qwen3-1.7B-GGUF", config!("qwen3-1.7b")),
    gguf("smollm3-3b", 3_075, APACHE, "ggml-org/SmolLM3-3B-GGUF", config!("smollm3-3b")),
    gguf("llama3.2-3b", 3_213, LLAMA, "unsloth/Llama-3.2-3B-Instruct-GGUF", config!("llama-3.2-3b")),
    gguf("phi4-mini", 3_836, MIT, "unsloth/Phi-4-mini-instruct-GGUF", config!("phi-4-mini-3.8b")),
    gguf("gemma3-4b", 3_880, GEMMA, "unsloth/gemma-3-4b-it-GGUF", config!("gemma-3-4b")),
    gguf("qwen3-4b", 4_022, APACHE, "Qwen/Qwen3-4B-GGUF", config!("qwen3-4b")),
    gguf("qwen3.5-4b", 4_206, APACHE, "unsloth/Qwen3.5-4B-GGUF", config!("qwen3.5-4b")),
    gguf("granite4-h-tiny", 6_940, APACHE, "ibm-granite/granite-4.0-h-tiny-GGUF", config!("granite-4.0-h-tiny")),
    gguf("olmo3-7b", 7_298, APACHE, "unsloth/Olmo-3-7B-Instruct-GGUF", config!("olmo-3-7b")),
    gguf("gemma4-e4b", 7_464, APACHE, "unsloth/gemma-4-E4B-it-GGUF", config!("gemma-4-e4b")),
    gguf(
        "hunyuan-7b",
        7_505,
        "Tencent Hunyuan Community License",
        "bartowski/tencent_Hunyuan-7B-Instruct-GGUF",
        config!("hunyuan-7b"),
    ),
    gguf("qwen2.5-coder-7b", 7_616, APACHE, "unsloth/Qwen2.5-Coder-7B-Instruct-GGUF", config!("qwen2.5-7b")),
    gguf("llama3.1-8b", 8_030, LLAMA, "unsloth/Llama-3.1-8B-Instruct-GGUF", config!("llama-3.1-8b")),
    gguf("granite3.3-8b", 8_171, APACHE, "ibm-granite/granite-3.3-8b-instruct-GGUF", config!("granite-3.3-8b")),
    gguf("qwen3-8b", 8_191, APACHE, "Qwen/Qwen3-8B-GGUF", config!("qwen3-8b")),
    gguf("lfm2-8b-a1b", 8_340, LFM, "LiquidAI/LFM2-8B-A1B-GGUF", config!("lfm2-8b-a1b")),
    gguf("ministral3-8b", 8_490, APACHE, "mistralai/Ministral-3-8B-Instruct-2512-GGUF", config!("ministral-3-8b")),
    gguf("gemma2-9b", 9_242, GEMMA, "bartowski/gemma-2-9b-it-GGUF", config!("gemma-2-9b")),
    gguf("glm4-9b", 9_400, MIT, "unsloth/GLM-4-9B-0414-GGUF", config!("glm-4-9b-0414")),
    gguf("gemma3-12b", 11_766, GEMMA, "unsloth/gemma-3-12b-it-GGUF", config!("gemma-3-12b")),
    gguf("phi4", 14_660, MIT, "unsloth/phi-4-GGUF", config!("phi-4-14b")),
    gguf("qwen3-14b", 14_768, APACHE, "Qwen/Qwen3-14B-GGUF", config!("qwen3-14b")),
    gguf("gpt-oss-20b", 20_915, APACHE, "ggml-org/gpt-oss-20b-GGUF", config!("gpt-oss-20b")),
    gguf("ernie4.5-21b-a3b", 21_825, APACHE, "unsloth/ERNIE-4.5-21B-A3B-PT-GGUF", config!("ernie-4.5-21b-a3b")),
    gguf(
        "mistral-small-24b",
        23_572,
        APACHE,
        "unsloth/Mistral-Small-24B-Instruct-2501-GGUF",
        config!("mistral-small-24b"),
    ),
    gguf("gemma4-26b-a4b", 25_233, APACHE, "unsloth/gemma-4-26B-A4B-it-GGUF", config!("gemma-4-26b-a4b")),
    gguf("gemma3-27b", 27_009, GEMMA, "unsloth/gemma-3-27b-it-GGUF", config!("gemma-3-27b")),
    checkpoint(
        "muse-glimmer-30b",
        (Kind::Text, 27_863),
        APACHE,
        "meta-models/Muse-Glimmer-30B",
        config!("muse-glimmer-30b"),
    ),
    gguf("glm4.7-flash", 29_957, MIT, "unsloth/GLM-4.7-Flash-GGUF", config!("glm-4.7-flash")),
    gguf("qwen3-30b-a3b", 30_532, APACHE, "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF", config!("qwen3-30b-a3b")),
    gguf("qwen3-coder-30b-a3b", 30_532, APACHE, "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF", config!("qwen3-30b-a3b")),
    gguf(
        "nemotron3-nano-30b-a3b",
        31_567,
        "NVIDIA Open Model License",
        "unsloth/Nemotron-3-Nano-30B-A3B-GGUF",
        config!("nemotron-3-nano-30b-a3b"),
    ),
    gguf("qwen3-32b", 32_762, APACHE, "Qwen/Qwen3-32B-GGUF", config!("qwen3-32b")),
    gguf("qwen3.5-35b-a3b", 34_682, APACHE, "unsloth/Qwen3.5-35B-A3B-GGUF", config!("qwen3.5-35b-a3b")),
    gguf("llama3.3-70b", 70_554, LLAMA, "unsloth/Llama-3.3-70B-Instruct-GGUF", config!("llama-70b")),
    gguf(
        "qwen3-next-80b-a3b",
        79_674,
        APACHE,
        "unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF",
        config!("qwen3-next-80b-a3b"),
    ),
    gguf("glm4.5-air", 106_852, MIT, "unsloth/GLM-4.5-Air-GGUF", config!("glm-4.5-air-106b-a12b")),
    gguf(
        "llama4-scout-109b-a17b",
        107_750,
        LLAMA,
        "unsloth/Llama-4-Scout-17B-16E-Instruct-GGUF",
        config!("llama-4-scout-109b-a17b"),
    ),
    gguf("gpt-oss-120b", 116_830, APACHE, "ggml-org/gpt-oss-120b-GGUF", config!("gpt-oss-120b")),
    gguf("qwen3.5-122b-a10b", 122_111, APACHE, "unsloth/Qwen3.5-122B-A10B-GGUF", config!("qwen3.5-122b-a10b")),
    checkpoint("lfm2-vl-1.6b", (Kind::Vision, 1_597), LFM, "LiquidAI/LFM2-VL-1.6B", config!("lfm2-vl-1.6b")),
    checkpoint("qwen3-vl-2b", (Kind::Vision, 2_128), APACHE, "Qwen/Qwen3-VL-2B-Instruct", config!("qwen3-vl-2b")),
    checkpoint("qwen3-vl-4b", (Kind::Vision, 4_438), APACHE, "Qwen/Qwen3-VL-4B-Instruct", config!("qwen3-vl-4b")),
    gguf_vision("gemma4-e2b", 5_105, APACHE, "unsloth/gemma-4-E2B-it-GGUF", config!("gemma-4-e2b-it")),
    checkpoint("qwen3-vl-8b", (Kind::Vision, 8_767), APACHE, "Qwen/Qwen3-VL-8B-Instruct", config!("qwen3-vl-8b")),
    gguf_vision("gemma4-31b", 31_299, APACHE, "unsloth/gemma-4-31B-it-GGUF", config!("gemma-4-31b-it")),
    ours("minilm", Kind::Embeddings, 23, APACHE, config!("minilm-l6")),
    checkpoint("bge-small-en", (Kind::Embeddings, 33), MIT, "BAAI/bge-small-en-v1.5", config!("bge-small-en")),
    checkpoint(
        "multilingual-e5-small",
        (Kind::Embeddings, 118),
        MIT,
        "intfloat/multilingual-e5-small",
        config!("multilingual-e5-small"),
    ),
    checkpoint(
        "nomic-embed-text-v1.5",
        (Kind::Embeddings, 137),
        APACHE,
        "nomic-ai/nomic-embed-text-v1.5",
        config!("nomic-embed-text-v1.5"),
    ),
    checkpoint(
        "gte-modernbert-base",
        (Kind::Embeddings, 149),
        APACHE,
        "Alibaba-NLP/gte-modernbert-base",
        config!("gte-modernbert-base"),
    ),
    checkpoint(
        "embeddinggemma-300m",
        (Kind::Embeddings, 303),
        GEMMA,
        "google/embeddinggemma-300m",
        config!("embeddinggemma-300m"),
    ),
    checkpoint(
        "qwen3-embedding-0.6b",
        (Kind::Embeddings, 596),
        APACHE,
        "Qwen/Qwen3-Embedding-0.6B",
        config!("qwen3-0.6b"),
    ),
    checkpoint(
        "ms-marco-minilm",
        (Kind::Rerank, 23),
        APACHE,
        "cross-encoder/ms-marco-MiniLM-L6-v2",
        config!("ms-marco-minilm-l6"),
    ),
    checkpoint(
        "gte-reranker-modernbert-base",
        (Kind::Rerank, 150),
        APACHE,
        "Alibaba-NLP/gte-reranker-modernbert-base",
        config!("gte-reranker-modernbert-base"),
    ),
    checkpoint(
        "bge-reranker-v2-m3",
        (Kind::Rerank, 568),
        APACHE,
        "BAAI/bge-reranker-v2-m3",
        config!("bge-reranker-v2-m3"),
    ),
    checkpoint("qwen3-reranker-0.6b", (Kind::Rerank, 596), APACHE, "Qwen/Qwen3-Reranker-0.6B", config!("qwen3-0.6b")),
    checkpoint(
        "whisper-large-v3-turbo",
        (Kind::Audio, 812),
        MIT,
        "openai/whisper-large-v3-turbo",
        config!("whisper-large-v3-turbo"),
    ),
    checkpoint("qwen2.5-omni-7b", (Kind::Audio, 8_934), APACHE, "Qwen/Qwen2.5-Omni-7B", config!("qwen2.5-omni-7b")),
];

/// Returns the model of that exact name.
pub(crate) fn find(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| known.name == name)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::catalogue;
    use crate::names::{check_file, check_repo};

    #[test]
    fn every_row_is_well_formed() {
        let mut seen = HashSet::new();
        for known in KNOWN {
            assert!(seen.insert(known.name), "{} occurs twice", known.name);
            check_file(known.name).unwrap();
            assert!(known.config.trim_end().ends_with('}'), "{}", known.name);
            match known.repo {
                Some(repo) => check_repo(repo).unwrap(),
                None => assert!(catalogue::find(known.name).is_some(), "{}", known.name),
            }
            assert!(known.repo.is_none() || catalogue::find(known.name).is_none(), "{} is in both", known.name);
        }
        let text: Vec<_> = KNOWN.iter().filter(|known| known.kind == Kind::Text).map(|known| known.millions).collect();
        assert!(text.is_sorted() && text[0] < 200 && *text.last().unwrap() > 120_000);
    }
}
