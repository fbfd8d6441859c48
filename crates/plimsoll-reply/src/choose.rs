//! Finds a model's reply formats: from its chat template, or by name.

use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

use crate::formats::{
    DEEPSEEK, Format, GLM, GRANITE, Gemma, HERMES, HUNYUAN, Harmony, KIMI, LFM2, Llama, Marked, Mistral, NEMOTRON,
    OLMO3, PHI4, Pythonic, QWEN_XML, Sections, Tagged,
};
use crate::reasoning::Block;
use crate::{Start, Tools};

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// JSON between `<tool_call>` tags: Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3, ERNIE 4.5.
    Hermes,
    /// Tags inside `<tool_call>`: Qwen3-Coder, Qwen3.5, Nemotron 3.
    QwenXml,
    /// JSON alone, or after `<|python_tag|>`: Llama 3 and 4.
    Llama3,
    /// After `[TOOL_CALLS]`: Mistral.
    Mistral,
    /// Between full-width markers: DeepSeek.
    DeepSeek,
    /// `<arg_key>` and `<arg_value>`: GLM, Laguna.
    Glm,
    /// Braces with `<escape>`d text: FunctionGemma.
    FunctionGemma,
    /// Braces with `<|"|>` for quotes: Gemma 4.
    Gemma4,
    /// Channels: gpt-oss.
    Harmony,
    /// A list of calls in Python's notation: LFM2.
    Lfm2,
    /// Lines of calls in Python's notation: OLMo 3.
    Olmo3,
    /// In a section, with the name in an id: Kimi K2.
    KimiK2,
    /// A JSON list between `<TOOLCALL>` tags: Nemotron Nano 2.
    Nemotron,
    /// A JSON list after `<|tool_call|>`: Granite 3.
    Granite,
    /// A JSON list after `<|tool_call|>` or `functools`: Phi-4-mini.
    Phi4Mini,
    /// A JSON list between `<tool_calls>` tags: Hunyuan.
    Hunyuan,
}

/// A model's format of reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Between `<think>` and `</think>`: Qwen, DeepSeek, GLM and many more.
    Think,
    /// Between `[THINK]` and `[/THINK]`: Mistral.
    Mistral,
    /// Between `<seed:think>` and `</seed:think>`: Seed-OSS.
    Seed,
    /// Between `<|channel>reasoning` and `<channel|>`: Gemma 4.
    Gemma4,
    /// In the `analysis` channel: gpt-oss.
    Harmony,
}

/// An operator's choice of a format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice<T> {
    /// Detect it from the chat template.
    #[default]
    Auto,
    /// No format: the text passes unchanged.
    Off,
    /// This one.
    Is(T),
}

impl<T> Choice<T> {
    /// The selected format. `shown` is the template's.
    pub fn or_shown(self, shown: impl FnOnce() -> Option<T>) -> Option<T> {
        match self {
            Self::Auto => shown(),
            Self::Off => None,
            Self::Is(format) => Some(format),
        }
    }
}

impl<T: FromStr<Err = UnknownFormat>> FromStr for Choice<T> {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        match name {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::Off),
            name => name.parse().map(Self::Is),
        }
    }
}

/// The name of an unknown format.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("unknown format `{name}`; known are auto, none, {known}")]
pub struct UnknownFormat {
    name: String,
    known: &'static str,
}

const THINK: Block = Block { open: "<think>", close: &["</think>"] };
const MISTRAL: Block = Block { open: "[THINK]", close: &["[/THINK]"] };
const SEED: Block = Block { open: "<seed:think>", close: &["</seed:think>"] };
const GEMMA4: Block = Block { open: "<|channel>thought\n", close: &["<channel|>"] };

impl ToolFormat {
    /// The format that a template shows, if it shows one.
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        Some(match () {
            () if has("<|channel|>") && has("<|message|>") => Self::Harmony,
            () if has("<|tool_call_start|>") || has("<|tool_list_start|>") => Self::Lfm2,
            () if has("<|tool_call>") => Self::Gemma4,
            () if has("<start_function_call>") => Self::FunctionGemma,
            () if has("<function=") && has("<parameter=") => Self::QwenXml,
            () if has("<arg_key>") => Self::Glm,
            () if has("<｜tool▁call▁begin｜>") => Self::DeepSeek,
            () if has("<|tool_call_begin|>") => Self::KimiK2,
            () if has("[TOOL_CALLS]") => Self::Mistral,
            () if has("<TOOLCALL>") => Self::Nemotron,
            // Without the bracket, `<tool_calls>` may stand around calls in other tags.
            () if has("<tool_calls>[") => Self::Hunyuan,
            () if has("<function_calls>") => Self::Olmo3,
            // Phi-4-mini's own template shows only where its tools stand.
            () if has("<|/tool_call|>") || has("<|/tool|>") => Self::Phi4Mini,
            () if has("<|tool_call|>") => Self::Granite,
            () if has("<tool_call>") => Self::Hermes,
            () if has("<|python_tag|>") || has("\"parameters\": dictionary of argument name") => Self::Llama3,
            () => return None,
        })
    }

    /// The strings that mark calls. Where they are special tokens, their text is needed for reading the reply.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::QwenXml => HERMES.all(),
            Self::Llama3 => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Self::DeepSeek => &[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁sep｜>",
            ],
            Self::Glm => &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
            Self::FunctionGemma => &["<start_function_call>", "<end_function_call>", "<escape>"],
            Self::Gemma4 => &["<|tool_call>", "<tool_call|>", "<|\"|>"],
            Self::Harmony => HARMONY_MARKERS,
            Self::Lfm2 => LFM2.markers,
            Self::Olmo3 => OLMO3.markers,
            Self::KimiK2 => &[
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                "<|tool_call_begin|>",
                "<|tool_call_end|>",
                "<|tool_call_argument_begin|>",
            ],
            Self::Nemotron => NEMOTRON.all(),
            Self::Granite => GRANITE.all(),
            Self::Phi4Mini => PHI4.all(),
            Self::Hunyuan => HUNYUAN.all(),
        }
    }

    pub(crate) fn machine(self, tools: &Arc<Tools>, start: Start) -> Box<dyn Format> {
        match self {
            Self::Hermes => Box::new(Marked::new(&HERMES)),
            Self::QwenXml => Box::new(Tagged::new(&QWEN_XML, Arc::clone(tools))),
            Self::Llama3 => Box::new(Llama::new(Arc::clone(tools))),
            Self::Mistral => Box::new(Mistral::new()),
            Self::DeepSeek => Box::new(Sections::new(&DEEPSEEK)),
            Self::Glm => Box::new(Tagged::new(&GLM, Arc::clone(tools))),
            Self::FunctionGemma => Box::new(Gemma::function()),
            Self::Gemma4 => Box::new(Gemma::four()),
            Self::Harmony => Box::new(Harmony::new(true, start)),
            Self::Lfm2 => Box::new(Pythonic::new(&LFM2)),
            Self::Olmo3 => Box::new(Pythonic::new(&OLMO3)),
            Self::KimiK2 => Box::new(Sections::new(&KIMI)),
            Self::Nemotron => Box::new(Marked::new(&NEMOTRON)),
            Self::Granite => Box::new(Marked::new(&GRANITE)),
            Self::Phi4Mini => Box::new(Marked::new(&PHI4)),
            Self::Hunyuan => Box::new(Marked::new(&HUNYUAN)),
        }
    }
}

const HARMONY_MARKERS: &[&str] =
    &["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"];

impl ReasoningFormat {
    /// The format that a template shows, if it shows one.
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        Some(match () {
            () if has("<|channel|>") && has("<|message|>") => Self::Harmony,
            () if has("<|channel>thought") => Self::Gemma4,
            () if has("<seed:think>") => Self::Seed,
            () if has("[THINK]") => Self::Mistral,
            () if has("<think>") || has("</think>") => Self::Think,
            () => return None,
        })
    }

    /// Whether a rendered prompt ends inside a thinking block.
    pub fn opened_by(self, prompt: &str) -> bool {
        self.block().is_some_and(|block| prompt.trim_end().ends_with(block.open.trim_end()))
    }

    /// Whether `text` ends inside a thinking block.
    pub fn opened_in(self, text: &str) -> bool {
        self.block().is_some_and(|block| {
            let after = text.rfind(block.open.trim_end()).map(|at| &text[at..]);
            after.is_some_and(|reasoning| !reasoning.contains(block.close[0]))
        })
    }

    /// The strings that mark reasoning. Where they are special tokens, their text is needed for reading the reply.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Think => &["<think>", "</think>"],
            Self::Mistral => &["[THINK]", "[/THINK]"],
            Self::Seed => &["<seed:think>", "</seed:think>"],
            Self::Gemma4 => &["<|channel>", "<channel|>"],
            Self::Harmony => HARMONY_MARKERS,
        }
    }

    /// The text that opens a block; none where a block has no such text.
    pub fn open(self) -> Option<&'static str> {
        self.block().map(|block| block.open)
    }

    /// The text that ends a block; none where a block has no such text.
    pub fn close(self) -> Option<&'static str> {
        self.block().map(|block| block.close[0])
    }

    pub(crate) fn block(self) -> Option<&'static Block> {
        match self {
            Self::Think => Some(&THINK),
            Self::Mistral => Some(&MISTRAL),
            Self::Seed => Some(&SEED),
            Self::Gemma4 => Some(&GEMMA4),
            Self::Harmony => None,
        }
    }
}

impl FromStr for ToolFormat {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        Ok(match name {
            "hermes" | "qwen" | "qwen2_5" | "qwen3" | "granite4" | "ernie45" => Self::Hermes,
            "qwen3_coder" | "qwen3_xml" => Self::QwenXml,
            "llama3_json" | "llama4_json" => Self::Llama3,
            "mistral" => Self::Mistral,
            "deepseek_v3" | "deepseek_v31" => Self::DeepSeek,
            "glm45" | "glm47" | "poolside_v1" => Self::Glm,
            "functiongemma" => Self::FunctionGemma,
            "gemma4" => Self::Gemma4,
            "openai" | "harmony" => Self::Harmony,
            "lfm2" => Self::Lfm2,
            "olmo3" => Self::Olmo3,
            "kimi_k2" => Self::KimiK2,
            "nemotron_json" | "llama_nemotron_json" => Self::Nemotron,
            "granite" => Self::Granite,
            "phi4_mini_json" => Self::Phi4Mini,
            "hunyuan_a13b" => Self::Hunyuan,
            _ => {
                let known = "hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, deepseek_v31, glm45, functiongemma, gemma4, openai, lfm2, olmo3, kimi_k2, nemotron_json, granite, phi4_mini_json, hunyuan_a13b";
                return Err(UnknownFormat { name: name.into(), known });
            }
        })
    }
}

impl FromStr for ReasoningFormat {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        Ok(match name {
            "think" | "qwen3" | "deepseek_r1" | "deepseek_v3" | "glm45" | "hunyuan" | "minimax_m2" => Self::Think,
            "mistral" => Self::Mistral,
            "seed_oss" => Self::Seed,
            "gemma4" => Self::Gemma4,
            "openai" | "openai_gptoss" | "harmony" => Self::Harmony,
            _ => {
                let known = "think (also qwen3, deepseek_r1, glm45), mistral, seed_oss, gemma4, openai";
                return Err(UnknownFormat { name: name.into(), known });
            }
        })
    }
}
