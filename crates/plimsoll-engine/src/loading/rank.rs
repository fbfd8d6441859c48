//! Decoders that score a document for a query: the probability that the next token is "yes" and not "no", as Qwen3-Reranker does.
//!
//! The prompt's last hidden state is multiplied with the output head's rows of "yes" and "no". A GGUF file can have these two rows alone.
//! Reference: Qwen3-Reranker's model card; llama.cpp's converter.

use plimsoll_formats::{Architecture, Checkpoint, FormatError, JUDGE, RowBuf};
use plimsoll_text::Tokenizer;

/// The key of the prompt in GGUF files.
const KEY: &str = "tokenizer.chat_template.rerank";
/// The prompt of Qwen3-Reranker, for files without it.
const TEMPLATE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
    provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, \
    retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n\
    <think>\n\n</think>\n\n";
/// The fixed texts before and after the user's part of the prompt.
const USER: &str = "<|im_start|>user\n";
const END: &str = "<|im_end|>";

/// How a decoder scores a document for a query.
#[derive(Clone, Debug, PartialEq)]
pub struct Rank {
    /// The output head's rows of "yes" and "no".
    answers: [Box<[f32]>; 2],
    /// The prompt's fixed tokens before the user's part and after it.
    pub around: [Box<[u32]>; 2],
    /// The fixed texts of the user's part: before the query, and between query and document.
    texts: [Box<str>; 2],
}

impl Rank {
    /// Reads the answers' rows and the prompt.
    ///
    /// # Errors
    /// A message that names the missing part of the checkpoint.
    pub(crate) fn read(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Self, String> {
        if !ranks(&checkpoint.config.architecture) {
            return Err(format!("{} does not score texts; Qwen3-Reranker does", checkpoint.config.architecture));
        }
        let template = checkpoint.gguf().and_then(|meta| meta.str(KEY)).unwrap_or(TEMPLATE);
        let wrong =
            || format!("{KEY} is not a prompt with {USER:?}, {{query}}, {{document}} and {END:?} in this order");
        let (before, rest) = template.split_once("{query}").ok_or_else(wrong)?;
        let (between, after) = rest.split_once("{document}").ok_or_else(wrong)?;
        let user = before.rfind(USER).ok_or_else(wrong)? + USER.len();
        if !after.starts_with(END) {
            return Err(wrong());
        }
        let encode = |text: &str| {
            tokenizer.encode(text, false, true).map(Vec::into_boxed_slice).map_err(|error| error.to_string())
        };
        Ok(Self {
            answers: answers(checkpoint, tokenizer)?,
            around: [encode(&before[..user])?, encode(after)?],
            texts: [before[user..].into(), between.into()],
        })
    }

    /// The user's part of the prompt up to the document, which ends it.
    pub fn before_document(&self, query: &str) -> String {
        [&self.texts[0], query, &self.texts[1]].concat()
    }

    /// Bytes of the user's part besides query and document.
    pub fn fixed_bytes(&self) -> usize {
        self.texts.iter().map(|text| text.len()).sum()
    }

    /// Returns the logit of "yes" less the logit of "no", from the prompt's last hidden state. The logistic function makes it the
    /// probability of "yes". Sums run in double precision, in order.
    pub fn score(&self, hidden: &[f32]) -> f64 {
        let logit = |row: &[f32]| row.iter().zip(hidden).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let [yes, no] = [0, 1].map(|answer| logit(&self.answers[answer]));
        yes - no
    }
}

/// Whether models of this architecture may score texts by their next token.
pub fn ranks(architecture: &Architecture) -> bool {
    *architecture == Architecture::Qwen3
}

/// The rows of "yes" and "no", from the classifier or from the output head.
fn answers(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<[Box<[f32]>; 2], String> {
    let row = |name: &str, row: usize| {
        let (mut buffer, mut values) = (RowBuf::default(), vec![0.0; checkpoint.config.hidden_size]);
        let width = checkpoint.tensor(name).ok_or_else(|| FormatError::NoSuchTensor(name.to_owned()))?.cols();
        if width != values.len() {
            return Err(FormatError::Config(format!("{name} has {width} columns; the model has {}", values.len())));
        }
        if checkpoint.column_order(name).is_some() {
            return Err(FormatError::Unsupported(format!("scores of {name} with ordered columns (GPTQ's act-order)")));
        }
        checkpoint.decode_rows(name, row, &mut buffer)?;
        buffer.dequantize(&mut values);
        Ok(values.into_boxed_slice())
    };
    if checkpoint.config.variant.judges {
        let rows = row(JUDGE, 0).and_then(|yes| Ok([yes, row(JUDGE, 1)?]));
        return rows.map_err(|error| error.to_string());
    }
    let head = match checkpoint.config.tie_word_embeddings {
        true => "model.embed_tokens.weight",
        false => "lm_head.weight",
    };
    let of_word = |word: &str| {
        let id = tokenizer.token_to_id(word).ok_or_else(|| {
            format!("the vocabulary has no token {word:?}, which Qwen3-Reranker answers with: this is another model")
        })?;
        row(head, id as usize).map_err(|error| error.to_string())
    };
    Ok([of_word("yes")?, of_word("no")?])
}
