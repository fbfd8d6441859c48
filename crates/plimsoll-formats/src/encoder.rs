//! What makes a model an encoder of text: its tables, where its norms stand, and what it makes of the hidden states.

use crate::activation::Activation;
use crate::bounds::{KINDS_MAX, within};
use crate::error::FormatError;

/// What an encoder has besides its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoder {
    /// Rows of the table of positions; 0: there is none, and queries and keys are rotated.
    pub positions: usize,
    /// The row of the first position: RoBERTa counts after its padding token.
    pub first_position: usize,
    /// Rows of the table of token types (first and second text of a pair); 0 without one.
    pub token_types: usize,
    /// Whether norms stand before each half of a layer, and one behind all layers; otherwise one stands behind each half. The first
    /// attention has none before it: the embeddings are normed.
    pub norms_before: bool,
    /// Whether norms have biases.
    pub norm_bias: bool,
    /// Whether feed-forward parts have a gate.
    pub gated: bool,
    /// Scores that the classifier gives, where there is one.
    pub labels: Option<usize>,
    /// Whether a score goes through the logistic function before it is reported.
    pub sigmoid: bool,
    /// What the classifier does, where there is one.
    pub classifier: Classifier,
    /// What makes an embedding of the hidden states, where the checkpoint has layers for it.
    pub dense: Option<Dense>,
}

/// Dense layers of sentence-transformers behind the pooling (`dense.0`, `dense.1`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dense {
    /// Whether they read the mean of all positions; otherwise the first one.
    pub mean: bool,
    /// The layers, in their order.
    pub layers: [Option<DenseLayer>; 2],
}

/// A dense layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseLayer {
    /// Its outputs.
    pub width: usize,
    /// Whether it has a bias.
    pub bias: bool,
    /// Whether tanh follows.
    pub tanh: bool,
}

impl Dense {
    /// Numbers of an embedding.
    pub fn width(&self) -> usize {
        self.layers.iter().flatten().last().map_or(0, |layer| layer.width)
    }
}

/// What a classifier does between the hidden states and the scores: a matrix and an activation, and then perhaps a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Classifier {
    /// Whether it reads the mean of all positions; otherwise the first one.
    pub mean: bool,
    /// The activation.
    pub activation: Activation,
    /// Whether the matrix has a bias.
    pub bias: bool,
    /// Whether a norm follows.
    pub norm: bool,
}

impl Encoder {
    /// What a decoder of which every position sees every other has of an encoder.
    pub(crate) const BIDIRECTIONAL: Self = Self {
        positions: 0,
        first_position: 0,
        token_types: 0,
        norms_before: true,
        norm_bias: false,
        gated: true,
        labels: None,
        sigmoid: true,
        classifier: Classifier { mean: false, activation: Activation::Tanh, bias: true, norm: false },
        dense: None,
    };

    /// BERT's layout: norms with biases after each half of a layer, and no table of positions, token types or gates.
    pub(crate) const PLAIN: Self = Self { norms_before: false, norm_bias: true, gated: false, ..Self::BIDIRECTIONAL };

    pub(crate) fn check(&self) -> Result<(), FormatError> {
        within("type_vocab_size", self.token_types.max(1), KINDS_MAX)?;
        within("labels", self.labels.unwrap_or(1), KINDS_MAX)
    }
}
